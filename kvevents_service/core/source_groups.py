"""The groups of a source, learned from its stores: engines say their kind and size with each of them, or never."""

from __future__ import annotations

from typing import Final, NamedTuple

from kvevents_service.core.groups import MAX_GROUPS, PREFIX_KINDS
from kvevents_service.wire.control import GroupSpec
from kvevents_service.wire.events import BlockStored
from kvevents_service.wire.media import canonical_medium

UNSAID_KIND: Final = "full_attention"
"""What a group is whose kind is not said: vLLM up to 0.23, SGLang and TensorRT-LLM have no other."""
MAX_KINDS: Final = 4096


class StoreKind(NamedTuple):
    """What stores that describe themselves alike have in common. chained: a block of it needs its parent."""

    group: GroupSpec
    medium: str
    inner: bool
    chained: bool


class SourceGroups:
    """One StoreKind for each way in which a store describes itself, and one GroupSpec for each of its group.

    block_size: of the main group, where it is known; hashes of fewer tokens end inside its blocks then. main is the
    first group of a prefix kind that stores something.
    """

    def __init__(self, block_size: int = 0) -> None:
        self.block_size = block_size
        self.main: int | None = None
        self._specs: dict[tuple[int, str, int, int | None], GroupSpec] = {}
        self._kinds: dict[tuple[str | None, int | None, str | None, int, int | None], StoreKind] = {}

    def kind_of(self, event: BlockStored) -> StoreKind | None:
        """What this store says of itself; None for an index that no group has, or too many descriptions."""
        key = (
            event.medium, event.group_idx, event.kv_cache_spec_kind, event.block_size,
            event.kv_cache_spec_sliding_window,
        )  # fmt: skip
        found = self._kinds.get(key)
        if found is None and (found := self._learn(event)) is not None:
            self._kinds[key] = found
        return found

    def _learn(self, event: BlockStored) -> StoreKind | None:
        index, kind, size = event.group_idx or 0, event.kv_cache_spec_kind or UNSAID_KIND, event.block_size
        if not 0 <= index < MAX_GROUPS or size <= 0 or len(self._kinds) >= MAX_KINDS:
            return None
        prefix = kind in PREFIX_KINDS
        if self.main is None and prefix:
            self.main = index
        key = index, kind, size, event.kv_cache_spec_sliding_window
        spec = self._specs.setdefault(key, GroupSpec(*key, main=index == self.main))
        inner = index == self.main and size < self.block_size
        return StoreKind(spec, canonical_medium(event.medium), inner, prefix and not inner)
