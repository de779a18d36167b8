"""NVIDIA Dynamo 1.6.1: its zmq wire decoder and indexer, and with `relay` the counting of its KvEventPublisher.

Row "NVIDIA Dynamo" of the consumers' table, and what the program itself (ai-dynamo-runtime 1.6.1) did with such
batches: it checks the types of extra keys but tells blocks apart by tokens and adapter only; it drops an event with
an owner or of another locality and keeps the rest of its batch; the lower tiers hold blocks by their parent's hash,
in whatever order they come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from doubles.reading import (
    Message,
    Refused,
    array,
    as_map,
    chunks,
    is_int,
    optional,
    read,
    refuse_unless,
    tokens_of,
)

TIERS = {
    **dict.fromkeys(("GPU", "DEVICE", ""), "device"),
    **dict.fromkeys(("CPU", "CPU_PINNED", "CPU_TIER1"), "host"),
    **dict.fromkeys(("CPU_TIER2", "STORAGE", "DISK", "NVME"), "disk"),
    **dict.fromkeys(("EXTERNAL", "REMOTE", "NETWORK", "SHARED"), "external"),
}
"""Case matters; anything else is dropped without a word."""
MAIN_KINDS = (None, "full_attention", "mla_attention")
MASK64 = (1 << 64) - 1
KEYS = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "group_idx", "kv_cache_spec_kind"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


class Edge(NamedTuple):
    """A block by what is before it: its parent's hash, its tokens and adapter."""

    parent: int | None
    key: Hashable


class Tier:
    """Blocks by their edges. Of two with the same edge the first keeps its name. `rooted`: no orphans."""

    def __init__(self, *, rooted: bool) -> None:
        self.names: dict[Edge, int] = {}
        self.edges: dict[int, Edge] = {}
        self.rooted = rooted

    def store(self, parent: int | None, names: Sequence[int], keys: Sequence[Hashable]) -> None:
        if self.rooted and parent is not None and parent not in self.edges:
            return
        for name, key in zip(names, keys, strict=True):
            edge = Edge(parent, key)
            self.names.setdefault(edge, name)
            self.edges.setdefault(self.names[edge], edge)
            parent = self.names[edge]

    def remove(self, name: int) -> None:
        edge = self.edges.pop(name, None)
        if edge is None:
            return
        del self.names[edge]
        if self.rooted:
            for child in [child for child, its in self.edges.items() if its.parent == name]:
                self.remove(child)

    def walk(self, parent: int | None, keys: Sequence[Hashable]) -> tuple[int, int | None]:
        """How many blocks follow `parent`, and the name of the last one."""
        for count, key in enumerate(keys):
            if Edge(parent, key) not in self.names:
                return count, parent
            parent = self.names[Edge(parent, key)]
        return len(keys), parent


class Index:
    """One worker's blocks. `block_size` is the one it was registered with."""

    def __init__(self, block_size: int, *, relay: bool = False) -> None:
        self.tiers = {name: Tier(rooted=name == "device") for name in ("device", "host", "disk", "external")}
        self.last_seq = -1
        self._block_size = block_size
        self._relay = relay
        self._references: Counter[tuple[str, int]] = Counter()

    def feed(self, frames: list[bytes]) -> None:
        """Apply one live message; a number that is not above the last one is stale, unless this is the relay."""
        message = read(frames)
        events = self._batch(message)
        if message.seq > self.last_seq or self._relay:
            self.last_seq = message.seq
            for event in events:
                self._apply(event)

    def match(self, tokens: Sequence[int], *, lora: str | None = None) -> dict[str, int]:
        """Leading blocks that are on the device, on it or then the host, on these or then the lower tiers."""
        keys: list[Hashable] = [(block, lora) for block in chunks(tokens, self._block_size)]
        found, depth, last = {}, 0, None
        for name, tier in self.tiers.items():
            count, last = tier.walk(last, keys[depth:])
            depth += count
            found[name] = depth
        return {"gpu": found["device"], "cpu": found["host"], "disk": found["external"]}

    def held(self) -> dict[str, set[int]]:
        """The hashes on each tier that has any."""
        return {name: set(tier.edges) for name, tier in self.tiers.items() if tier.edges}

    def _batch(self, message: Message) -> list[dict[str, Any]]:
        ts, events, rank = array(message.value, "batch", (3,))
        refuse_unless(isinstance(ts, float | int), "ts is no number")
        refuse_unless(rank is None or is_int(rank, -(1 << 31), 1 << 31), "rank is no int")
        return [checked(event) for event in array(events, "events")]

    def _apply(self, event: dict[str, Any]) -> None:
        tier = TIERS.get(event.get("medium") or "")
        if event["type"] == "AllBlocksCleared":
            self.__init__(self._block_size, relay=self._relay)  # type: ignore[misc]
        elif tier and event.get("ownership") is None and event.get("locality") in (None, "LOCAL"):
            names = [name & MASK64 for name in event["block_hashes"]]
            if event["type"] == "BlockStored":
                self._store(tier, names, event)
            else:
                self._remove(tier, names)

    def _store(self, tier: str, names: list[int], event: dict[str, Any]) -> None:
        parent = event.get("parent_block_hash")
        fits = event["block_size"] == self._block_size and len(event["token_ids"]) == len(names) * self._block_size
        if fits and event.get("kv_cache_spec_kind") in MAIN_KINDS:
            keys = [(block, event.get("lora_name")) for block in chunks(event["token_ids"], self._block_size)]
            self._references.update((tier, name) for name in names)
            self.tiers[tier].store(None if parent is None else parent & MASK64, names, keys)

    def _remove(self, tier: str, names: list[int]) -> None:
        for name in names:
            self._references[tier, name] -= 1
            if not self._relay or self._references[tier, name] <= 0:
                self.tiers[tier].remove(name)


def checked(raw: Any) -> dict[str, Any]:
    """The event as a map, or Refused: one that cannot be read takes its batch with it. Unknown keys are ignored."""
    event = as_map(raw, KEYS)
    if event["type"] != "AllBlocksCleared":
        parent = event.get("parent_block_hash")
        hashes = [*array(event.get("block_hashes"), "block_hashes"), 0 if parent is None else parent]
        refuse_unless(all(map(is_int, hashes)), "a hash is no 64-bit int")
        optional(event.get("medium"), str, "medium")
    if event["type"] == "BlockStored":
        check_stored(event)
    return event


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
