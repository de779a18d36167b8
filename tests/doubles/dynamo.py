"""NVIDIA Dynamo 1.6.1: its zmq wire decoder and indexer, and with `relay` its KvEventPublisher.

Row "NVIDIA Dynamo" of the consumers' table. Extra keys and the inheritance of salts are as in its published source
(kv-router, zmq wire).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

from doubles.reading import Message, Refused, array, chunks, is_int, optional, read, refuse_unless, tokens_of
from doubles.tree import Path, Tree

TIERS = {
    **dict.fromkeys(("GPU", "DEVICE", ""), "device"),
    **dict.fromkeys(("CPU", "CPU_PINNED", "CPU_TIER1"), "host"),
    **dict.fromkeys(("CPU_TIER2", "STORAGE", "DISK", "NVME"), "disk"),
    **dict.fromkeys(("EXTERNAL", "REMOTE", "NETWORK", "SHARED"), "external"),
}
"""Case matters; anything else is dropped without a word."""
FASTER = {"device": (), "host": ("device",), "disk": ("host", "device"), "external": ("disk", "host", "device")}
MAIN_KINDS = (None, "full_attention", "mla_attention")
STORED = ("BlockStored", ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
                          "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"))  # fmt: skip
REMOVED = ("BlockRemoved", ("block_hashes", "medium", "group_idx"))


class Index:
    """One worker's blocks. `block_size` is the one it was registered with."""

    def __init__(self, block_size: int, *, relay: bool = False) -> None:
        self.tree = Tree()
        self.last_seq = -1
        self._block_size = block_size
        self._references: Counter[tuple[str, int]] | None = Counter() if relay else None
        self._salts: dict[int, str] = {}

    def feed(self, frames: list[bytes]) -> None:
        """Apply one live message; a number that is not above the last one is stale, unless this is the relay."""
        message = read(frames)
        events = [named(event) for event in self._batch(message)]
        if message.seq > self.last_seq or self._references is not None:
            self.last_seq = message.seq
            for event in events:
                self._apply(event)

    def match(
        self,
        tokens: Sequence[int],
        *,
        lora: str | None = None,
        images: dict[int, Any] | None = None,
        salt: str = "",
    ) -> dict[str, int]:
        """Leading blocks of a prompt on each tier. images: the hash of the image that a block shows, by block."""
        shown = images or {}
        return self.tree.match([
            (block, lora, (shown[place],) if place in shown else (), salt)
            for place, block in enumerate(chunks(tokens, self._block_size))
        ])  # fmt: skip

    def _batch(self, message: Message) -> list[Any]:
        ts, events, rank = array(message.value, "batch", (3,))
        refuse_unless(isinstance(ts, float | int), "ts is no number")
        refuse_unless(rank is None or is_int(rank, -(1 << 31), 1 << 31), "rank is no int")
        return [checked(event) for event in array(events, "events")]

    def _apply(self, event: dict[str, Any]) -> None:
        tier = TIERS.get(event.get("medium") or "")
        if event["type"] == "AllBlocksCleared":
            self.tree.clear()
            self._salts.clear()
            if self._references is not None:
                self._references.clear()
        elif tier and event["type"] == "BlockStored":
            self._store(tier, event)
        elif tier:
            self._remove(tier, event)

    def _store(self, tier: str, event: dict[str, Any]) -> None:
        hashes, tokens, parent = event["block_hashes"], event["token_ids"], event.get("parent_block_hash")
        main = not event.get("group_idx") and event.get("kv_cache_spec_kind") in MAIN_KINDS
        fits = event["block_size"] == self._block_size and len(tokens) == len(hashes) * self._block_size
        if not main or not fits:
            return
        if self._references is not None:
            self._references.update((tier, unsigned(name)) for name in hashes)
        salt = salt_of(event) or self._salts.get(unsigned(parent or 0), "")
        names = [unsigned(name) for name in hashes]
        self._salts.update(dict.fromkeys(names, salt))
        self.tree.store(tier, self._base(tier, parent), names, block_keys(event, salt))

    def _base(self, tier: str, parent: int | None) -> Path | None:
        if parent is None:
            return ()
        paths = (self.tree.path(place, unsigned(parent)) for place in (tier, *FASTER[tier]))
        return next((path for path in paths if path is not None), None)

    def _remove(self, tier: str, event: dict[str, Any]) -> None:
        for name in map(unsigned, event["block_hashes"]):
            if self._references is not None:
                self._references[tier, name] -= 1
                if self._references[tier, name] > 0:
                    continue
            path = self.tree.remove(tier, name)
            if tier == "device" and path is not None:
                self._lose_descendants(path)

    def _lose_descendants(self, path: Path) -> None:
        device = self.tree.tiers["device"]
        for name in [name for name, other in device.items() if other[: len(path)] == path and other != path]:
            del device[name]


def unsigned(name: int) -> int:
    return name & ((1 << 64) - 1)


def block_keys(event: dict[str, Any], salt: str) -> list[Hashable]:
    """What tells each block apart, beside the blocks before it."""
    blocks = chunks(event["token_ids"], event["block_size"])
    extra = event.get("extra_keys") or [None] * len(blocks)
    images = [tuple(name for item in entry or () if (name := image_of(item))) for entry in extra]
    return [(block, event.get("lora_name"), shown, salt) for block, shown in zip(blocks, images, strict=True)]


def image_of(item: Any) -> str | None:
    """64 hex digits are the hash of an image, alone or with an offset."""
    name = item[0] if isinstance(item, list) else item
    hexadecimal = isinstance(name, str) and len(name) == 64 and set(name) <= set("0123456789abcdefABCDEF")
    return name if hexadecimal else None


def salt_of(event: dict[str, Any]) -> str | None:
    """The first bare string of the first block that is neither an image nor the adapter."""
    first = (event.get("extra_keys") or [None])[0] or ()
    plain = (item for item in first if isinstance(item, str) and not image_of(item))
    return next((item for item in plain if item != event.get("lora_name")), None)


def named(event: Any) -> dict[str, Any]:
    """An event as a map, whichever layout it came in; extra positions are ignored."""
    if isinstance(event, dict):
        return event
    names = {"BlockStored": STORED[1], "BlockRemoved": REMOVED[1]}.get(event[0], ())
    return {"type": event[0], **dict(zip(names, event[1:], strict=False))}


def checked(raw: Any) -> Any:
    """The event, or Refused: one that cannot be read takes its batch with it. Unknown keys are ignored."""
    refuse_unless(isinstance(raw, dict) or (isinstance(raw, list) and raw), "an event is neither map nor array")
    event = named(raw)
    kind = event.get("type")
    refuse_unless(kind in ("BlockStored", "BlockRemoved", "AllBlocksCleared"), f"unknown event {kind!r}")
    if kind != "AllBlocksCleared":
        check_hashes(event)
        optional(event.get("medium"), str, "medium")
        refuse_unless(event.get("ownership") is None, "ownership")
        refuse_unless(event.get("locality") in (None, "LOCAL"), "locality")
    if kind == "BlockStored":
        check_stored(event)
    return raw


def check_hashes(event: dict[str, Any]) -> None:
    hashes = array(event.get("block_hashes"), "block_hashes")
    parent = event.get("parent_block_hash")
    refuse_unless(all(map(is_int, hashes)), "a hash is no 64-bit int")
    refuse_unless(parent is None or is_int(parent), "the parent is no 64-bit int")


def check_stored(event: dict[str, Any]) -> None:
    tokens_of(event.get("token_ids"))
    refuse_unless(is_int(event.get("block_size"), 0), "block_size is no unsigned int")
    optional(event.get("lora_name"), str, "lora_name")
    for entry in array(event.get("extra_keys") or [], "extra_keys"):
        for item in array([] if entry is None else entry, "an entry of extra_keys"):
            check_item(item)


def check_item(item: Any) -> None:
    if isinstance(item, list):
        if len(item) != 2 or not isinstance(item[0], str) or not is_int(item[1]):
            raise Refused("an extra key is neither a scalar nor a pair of text and int")
    else:
        refuse_unless(isinstance(item, str | int | float), "an extra key is a map, bytes or nil")
