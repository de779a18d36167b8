"""The groups of a source, learned from its stores: engines say their kind and size with each of them, or never."""

from __future__ import annotations

from typing import Final

from kvevents_service.core.groups import MAX_GROUPS, PREFIX_KINDS
from kvevents_service.wire.control import GroupSpec
from kvevents_service.wire.events import BlockStored

UNSAID_KIND: Final = "full_attention"
"""What a group is whose kind is not said: vLLM up to 0.23, SGLang and TensorRT-LLM have no other."""
MAX_SPECS: Final = 4096


class SourceGroups:
    """One GroupSpec for each way in which the stores of a group describe it.

    block_size: of the main group, where it is known; hashes of fewer tokens end inside its blocks then. main is the
    first group of a prefix kind that stores something.
    """

    def __init__(self, block_size: int = 0) -> None:
        self.block_size = block_size
        self.main: int | None = None
        self._specs: dict[tuple[int, str, int, int | None], GroupSpec] = {}

    def spec_of(self, event: BlockStored) -> GroupSpec | None:
        """What this store says of its group; None for an index that no group has, or too many descriptions."""
        index, kind = event.group_idx or 0, event.kv_cache_spec_kind or UNSAID_KIND
        key = (index, kind, event.block_size, event.kv_cache_spec_sliding_window)
        return self._specs.get(key) or self._learn(*key)

    def _learn(self, index: int, kind: str, block_size: int, window: int | None) -> GroupSpec | None:
        if not 0 <= index < MAX_GROUPS or block_size <= 0 or len(self._specs) >= MAX_SPECS:
            return None
        if self.main is None and kind in PREFIX_KINDS:
            self.main = index
        spec = GroupSpec(index, kind, block_size, window, main=index == self.main)
        self._specs[index, kind, block_size, window] = spec
        return spec

    def is_inner(self, spec: GroupSpec) -> bool:
        """Whether the hashes of such a store end inside blocks."""
        return spec.index == self.main and spec.block_size < self.block_size
