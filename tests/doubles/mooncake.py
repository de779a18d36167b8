"""Mooncake Conductor (its row of the consumers' table): by vLLM's own hashes, GPU and group 0 only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from doubles.reading import REQUIRED, array, is_int, leading, optional, read, refuse_unless, tokens_of

MAIN_KINDS = (None, "full_attention", "mla_attention", "sink_full_attention")


class Index:
    """One registered source: its block size, rank and adapter. `stale` once a number was missing."""

    def __init__(self, block_size: int, *, rank: int = 0, lora: str | None = None) -> None:
        self.held: set[int] = set()
        self.stale = False
        self.next_seq: int | None = None
        self._block_size = block_size
        self._rank = rank
        self._lora = lora or ""

    def feed(self, frames: list[bytes]) -> None:
        """Apply one message. A lower number is ignored; a hole makes the source stale until it registers anew."""
        message = read(frames)
        ts, events, rank = array(message.value, "batch", (3,))
        refuse_unless(isinstance(ts, float), "ts is no float")
        refuse_unless(rank is None or rank == self._rank, "another rank")
        checked = [self._checked(event) for event in array(events, "events")]
        if self.next_seq is not None and message.seq < self.next_seq:
            return
        if self.next_seq is not None and message.seq > self.next_seq:
            self.stale = True
            self.held.clear()
        self.next_seq = message.seq + 1
        if not self.stale:
            for event in checked:
                self._apply(event)

    def match(self, hashes: Sequence[int | bytes]) -> dict[str, int]:
        """Leading blocks of a prompt, by their hashes."""
        return {"GPU": leading(low64(name) in self.held for name in hashes)}

    def _checked(self, event: Any) -> dict[str, Any]:
        refuse_unless(isinstance(event, dict), "an event is no map")
        kind = event.get("type")
        refuse_unless(kind in REQUIRED and event.keys() >= REQUIRED[kind], "an unknown event or a key missing")
        if kind != "AllBlocksCleared":
            names = array(event["block_hashes"], "block_hashes")
            refuse_unless(all(isinstance(name, bytes) or is_int(name, 0) for name in names), "a hash is odd")
            optional(event["medium"], str, "medium")
        if kind == "BlockStored":
            tokens_of(event["token_ids"])
            optional(event["lora_name"], str, "lora_name")
        return event

    def _apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.held.clear()
        elif (event["medium"] or "").lower() != "gpu" or event.get("group_idx"):
            return
        elif event["type"] == "BlockRemoved":
            self.held.difference_update(map(low64, event["block_hashes"]))
        elif self._fits(event):
            self.held.update(map(low64, event["block_hashes"]))

    def _fits(self, event: dict[str, Any]) -> bool:
        """What contradicts the registration is left out, event by event."""
        registered = event["block_size"] == self._block_size and (event["lora_name"] or "") == self._lora
        window = event.get("kv_cache_spec_sliding_window")
        return registered and window is None and event.get("kv_cache_spec_kind") in MAIN_KINDS


def low64(name: int | bytes) -> int:
    return int.from_bytes(name[-8:], "big") if isinstance(name, bytes) else name
