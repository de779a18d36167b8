"""vllm-router 0.1.17 (its row of the consumers' table): maps only, every key known, most of them required."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from doubles.reading import REQUIRED, array, chunks, is_int, optional, read, refuse_unless, tokens_of
from doubles.tree import Tree

TIERS = {"GPU": "GPU", "CPU": "CPU", "STORAGE": "STORAGE", "DISK": "STORAGE"}
OPTIONAL = {
    "BlockStored": {"extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality",
                    "ownership", "session_id"},
    "BlockRemoved": {"group_idx", "locality", "ownership"},
    "AllBlocksCleared": set(),
}  # fmt: skip


MOST_BYTES = 16 * 1024 * 1024
"""Of a payload."""
MOST_EVENTS = 4096


class Index:
    """One worker's blocks by tokens and adapter. A source without discovery takes only the empty topic."""

    def __init__(self, block_size: int, rank: int = 0, *, most_bytes: int = MOST_BYTES) -> None:
        self.tree = Tree()
        self.last_seq = -1
        self._block_size = block_size
        self._rank = rank
        self._most_bytes = most_bytes

    def feed(self, frames: list[bytes]) -> None:
        """Apply one message; a number below the last one is a restart and clears first."""
        refuse_unless(len(frames[-1]) <= self._most_bytes, "a payload of more than 16 MiB")
        message = read(frames)
        if message.topic:
            return
        ts, events, *rank = array(message.value, "batch", (2, 3))
        refuse_unless(isinstance(ts, float), "ts is no float")
        refuse_unless(rank in ([], [None], [self._rank]), "another rank")
        refuse_unless(len(array(events, "events")) <= MOST_EVENTS, "more than 4,096 events")
        checked = [self._checked(event) for event in events]
        if message.seq < self.last_seq:
            self.tree.clear()
        self.last_seq = message.seq
        for event in checked:
            self._apply(event)

    def match(self, tokens: Sequence[int], *, lora: str | None = None) -> dict[str, int]:
        """Leading blocks of a prompt on each tier."""
        return self.tree.match([(block, lora) for block in chunks(tokens, self._block_size)])

    def _checked(self, event: Any) -> dict[str, Any]:
        refuse_unless(isinstance(event, dict), "an event is no map")
        kind = event.get("type")
        refuse_unless(kind in REQUIRED, "unknown event")
        keys = event.keys() - {"type"}
        refuse_unless(keys >= REQUIRED[kind], f"missing {REQUIRED[kind] - keys}")
        refuse_unless(keys <= REQUIRED[kind] | OPTIONAL[kind], f"unknown {keys - REQUIRED[kind] - OPTIONAL[kind]}")
        if kind != "AllBlocksCleared":
            refuse_unless(event["block_hashes"], "no hashes")
            for name in array(event["block_hashes"], "block_hashes"):
                check_hash(name)
            optional(event["medium"], str, "medium")
        if kind == "BlockStored":
            check_stored(event)
        return event

    def _apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.tree.clear()
            return
        tier = TIERS.get((event["medium"] or "GPU").upper(), "GPU")
        if event["type"] == "BlockStored":
            blocks = [(block, event["lora_name"]) for block in chunks(event["token_ids"], event["block_size"])]
            parent = event["parent_block_hash"]
            base = () if parent is None else self.tree.path(tier, parent)
            self.tree.store(tier, base, event["block_hashes"], blocks)
        else:
            for name in event["block_hashes"]:
                self.tree.remove(tier, name)


def check_hash(name: Any) -> None:
    refuse_unless(isinstance(name, bytes) or is_int(name, 0), "a hash is neither bytes nor unsigned")


def check_stored(event: dict[str, Any]) -> None:
    if event["parent_block_hash"] is not None:
        check_hash(event["parent_block_hash"])
    tokens_of(event["token_ids"])
    refuse_unless(is_int(event["block_size"], 0, 1 << 32), "block_size is not an unsigned 32-bit int")
    refuse_unless(event["lora_id"] is None or is_int(event["lora_id"], limit=1 << 63), "lora_id is odd")
    optional(event["lora_name"], str, "lora_name")
    group = event.get("group_idx")
    refuse_unless(group is None or is_int(group, 0, 1 << 32), "group_idx is odd")
