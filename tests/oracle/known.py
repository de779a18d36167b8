"""What the engine knows of a request's blocks: hashes, tokens and extra keys, as vLLM's own hasher grew them."""

from __future__ import annotations

from typing import Any

from oracle.models import Group, Model
from oracle.script import Answer


class Known:
    """One request. Block i of a group is named by the hash of its last unit."""

    def __init__(self, model: Model, lora: dict[str, Any] | None) -> None:
        self.model = model
        self.lora_id: int | None = lora and lora["id"]
        self.lora_name: str | None = lora and lora["name"]
        self.hashes: list[str] = []
        self.tokens: list[int] = []
        self._extra_keys: dict[int, list[Any]] = {size: [] for size in model.sizes}

    def grow(self, news: Answer) -> None:
        self.hashes += news["hashes"]
        self.tokens += news["tokens"]
        for size, keys in news["extra_keys"].items():
            self._extra_keys[int(size)] += keys

    def blocks(self, size: int) -> int:
        """How many ranges of this size are hashed."""
        return len(self.hashes) * self.model.hash_size // size

    def hash_at(self, tokens: int) -> str | None:
        """The hash of the prefix that ends at a hash boundary, in full; None for the empty prefix."""
        return self.hashes[tokens // self.model.hash_size - 1] if tokens else None

    def range_tokens(self, size: int, number: int) -> list[int]:
        return self.tokens[number * size : (number + 1) * size]

    def extra_keys(self, size: int, number: int) -> Any:
        """Of the n-th range of this size, in an event's shape."""
        return self._extra_keys[size][number]

    def name(self, group: Group, block: int) -> str:
        """The hash of a block, in full."""
        name = self.hash_at((block + 1) * group.block_size)
        assert name is not None
        return name
