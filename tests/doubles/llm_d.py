"""The llm-d router (row "llm-d router" of the consumers' table); `old` is its array-only version.

It computes keys of its own from the tokens; the publisher's hashes lead to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from doubles.reading import array, chunks, is_int, optional, read, refuse_unless, tokens_of
from doubles.tree import Tree

STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
REMOVED = ("block_hashes", "medium")
KINDS = {"BlockStored": STORED, "BlockRemoved": REMOVED, "AllBlocksCleared": ()}
OLD_MIN = 1 << 32
"""Below it the old version meets a shorter integer type and refuses it."""
WEIGHTS = {"gpu": 1.0, "cpu": 0.8}


class Index:
    """The blocks of one pod."""

    def __init__(self, block_size: int, *, old: bool = False) -> None:
        self.tree = Tree()
        self.last_seq = -1
        self._block_size = block_size
        self._old = old

    def feed(self, frames: list[bytes]) -> None:
        """Apply one message; a number below the last one resets the pod."""
        message = read(frames)
        parts = message.topic.split("@")
        named = len(parts) == 3 and parts[0] == "kv" and parts[1] and parts[2]
        refuse_unless(named or message.topic.startswith("node:"), "the topic is not kv@pod@model")
        batch = array(message.value, "batch")
        refuse_unless(len(batch) >= 2 and isinstance(batch[0], float), "no ts")
        events = [self._checked(event) for event in array(batch[1], "events")]
        if message.seq < self.last_seq:
            self.tree.clear()
        self.last_seq = message.seq
        for event in events:
            self._apply(event)

    def match(self, tokens: Sequence[int], *, lora: str | None = None) -> dict[str, int]:
        """Leading blocks of a prompt on each tier."""
        return self.tree.match([(block, lora) for block in chunks(tokens, self._block_size)])

    def score(self, tokens: Sequence[int], *, lora: str | None = None) -> float:
        """The best tier's blocks, weighted; a tier it does not know counts like the GPU."""
        return max((WEIGHTS.get(tier, 1.0) * n for tier, n in self.match(tokens, lora=lora).items()), default=0.0)

    def _checked(self, raw: Any) -> dict[str, Any]:
        """The event as a map, its hashes as unsigned ints."""
        event = raw
        if isinstance(raw, list) or self._old:
            kind, *values = array(raw, "event") or [None]
            refuse_unless(kind in KINDS, "unknown event")
            event = {"type": kind, **dict(zip(KINDS[kind], values, strict=False))}
        refuse_unless(isinstance(event, dict) and event.get("type") in KINDS, "unknown event")
        if event["type"] == "AllBlocksCleared":
            return {"type": event["type"]}
        hashes = [self._hash(name) for name in array(event.get("block_hashes"), "block_hashes")]
        medium = optional(event.get("medium"), str, "medium")
        clean = {**event, "block_hashes": hashes, "medium": "gpu" if medium is None else medium.lower()}
        return self._stored(clean) if event["type"] == "BlockStored" else clean

    def _stored(self, event: dict[str, Any]) -> dict[str, Any]:
        parent = event.get("parent_block_hash")
        tokens_of(event.get("token_ids"))
        refuse_unless(is_int(event.get("block_size"), limit=1 << 63), "block_size is no int")
        optional(event.get("lora_id"), int, "lora_id")
        optional(event.get("lora_name"), str, "lora_name")
        return {**event, "parent_block_hash": 0 if parent is None else self._hash(parent)}

    def _hash(self, name: Any) -> int:
        """Ints as they are, of bytes the last 8."""
        if isinstance(name, bytes):
            refuse_unless(name, "an empty hash")
            return int.from_bytes(name[-8:], "big")
        refuse_unless(is_int(name), "a hash is neither int nor bytes")
        refuse_unless(not self._old or not -OLD_MIN < name < OLD_MIN, "a hash below 2^32")
        return int(name) & ((1 << 64) - 1)

    def _apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.tree.clear()
        elif event["type"] == "BlockRemoved":
            for name in event["block_hashes"]:
                self.tree.remove(event["medium"], name)
        else:
            blocks = [(block, event.get("lora_name")) for block in chunks(event["token_ids"], self._block_size)]
            base = self._base(event["medium"], event["parent_block_hash"])
            if len(blocks) == len(event["block_hashes"]):
                self.tree.store(event["medium"], base, event["block_hashes"], blocks)

    def _base(self, tier: str, parent: int) -> Any:
        """The path of a parent on any tier; 0 is a root. None: it was never learned, the event is dropped."""
        if not parent:
            return ()
        paths = (self.tree.path(place, parent) for place in (tier, *self.tree.tiers))
        return next((path for path in paths if path is not None), None)
