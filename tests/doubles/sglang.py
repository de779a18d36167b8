"""The SGLang router (row "SGLang router" of the consumers' table): signed 64-bit hashes, maps or arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from doubles.reading import array, as_map, chunks, is_int, optional, read, refuse_unless, tokens_of
from doubles.tree import Tree

KEYS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
RESET_SEQ = (1 << 64) - 1


class Index:
    """One worker's blocks by tokens and, where it is said, adapter."""

    def __init__(self, block_size: int) -> None:
        self.tree = Tree()
        self._block_size = block_size

    def feed(self, frames: list[bytes]) -> None:
        """Apply one message; number -1 resets."""
        message = read(frames)
        if message.seq == RESET_SEQ:
            self.tree.clear()
            return
        batch = array(message.value, "batch")
        refuse_unless(len(batch) >= 2 and isinstance(batch[0], float), "no ts")
        for event in [checked(event) for event in array(batch[1], "events")]:
            self._apply(event)

    def match(self, tokens: Sequence[int], *, lora: str | None = None) -> dict[str, int]:
        """Leading blocks of a prompt on each tier."""
        return self.tree.match([(block, lora) for block in chunks(tokens, self._block_size)])

    def _apply(self, event: dict[str, Any]) -> None:
        tier = event.get("medium") or "GPU"
        if event["type"] == "AllBlocksCleared":
            self.tree.clear()
        elif event["type"] == "BlockRemoved":
            for name in event["block_hashes"]:
                self.tree.remove(tier, name)
        else:
            parent = event.get("parent_block_hash")
            base = () if parent is None else self.tree.path(tier, parent)
            keys = [(block, event.get("lora_name")) for block in chunks(event["token_ids"], event["block_size"])]
            self.tree.store(tier, base, event["block_hashes"], keys)


def checked(raw: Any) -> dict[str, Any]:
    """The event as a map. Unknown keys and positions are ignored."""
    event = as_map(raw, KEYS)
    if event["type"] != "AllBlocksCleared":
        names = [*array(event.get("block_hashes"), "block_hashes"), event.get("parent_block_hash") or 0]
        refuse_unless(all(is_int(name, limit=1 << 63) for name in names), "a hash is not a signed 64-bit int")
        optional(event.get("medium"), str, "medium")
    if event["type"] == "BlockStored":
        tokens_of(event.get("token_ids"))
        refuse_unless(is_int(event.get("block_size"), 1), "block_size is no positive int")
    return event
