"""Which publisher holds how much of a prompt on which tier, by the tokens alone: what a router asks.

A router does not know the engine's hash function, so a block is named here by what it holds: its key is the hash of
the parent's key, its tokens, and whatever else the publisher says went into its hash (adapter, salt, images). For
each key one int has a bit for every shelf (source and medium) that holds it, and one for every source, so a lookup
costs one hash and one `&` a block, however many sources there are.

About 190 bytes a block on one shelf (benchmarks/README.md). Blocks whose parent is not known wait, bounded, until it
comes; they are held by nobody meanwhile, and never taken for the start of a prompt.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Final, NamedTuple

from kvevents_service.core.groups import PREFIX_KINDS
from kvevents_service.core.residency import key64
from kvevents_service.wire.events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, Event
from kvevents_service.wire.media import canonical_medium

MAX_ORPHANS: Final = 65_536
TOKEN_BYTES: Final = 4
_MAX_MASKS: Final = 65_536
COUNTED: Final = (
    *("stored", "removed", "removed_unknown", "orphans_linked", "orphans_dropped", "other_groups", "malformed"),
    "other_block_size",
)


class Held(NamedTuple):
    """A prefix in tokens, from the first block on. tokens: with every block on any tier; media: on one alone."""

    tokens: int
    media: dict[str, int]


class _Orphan(NamedTuple):
    """A block whose parent is not known."""

    medium: str
    block_hash: int
    parent: int
    data: bytes
    extra: Hashable
    block_size: int


class _Shelf:
    """One medium of one source. keys: by block hash (its low 64 bits). again: keys that several hashes share."""

    __slots__ = ("again", "bit", "keys", "medium")

    def __init__(self, medium: str, bit: int) -> None:
        self.medium = medium
        self.bit = bit
        self.keys: dict[int, int] = {}
        self.again: Counter[int] = Counter()


class _Holder:
    """One source. bit: held on any shelf; mask: all its shelves. group: the one whose blocks count."""

    __slots__ = ("bit", "block_size", "group", "mask", "orphans", "shelves", "waiting")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.mask = 0
        self.group: int | None = None
        self.block_size = 0
        self.shelves: dict[str, _Shelf] = {}
        self.orphans: dict[tuple[str, int], _Orphan] = {}
        self.waiting: dict[int, set[tuple[str, int]]] = {}
        """Orphans by their parent's hash."""


class BlockIndex:
    """The blocks of many sources; a source is any hashable value.

    block_size: tokens, the only size taken; None: any, each with prefixes of its own. Only one group of a source
    counts: the first of a prefix kind (full attention) that it stores, group 0 if it says no kinds.
    """

    def __init__(self, block_size: int | None = None, max_orphans: int = MAX_ORPHANS) -> None:
        self.block_size = block_size
        self.max_orphans = max_orphans
        self.counts: Counter[str] = Counter()
        self._holders: dict[Hashable, _Holder] = {}
        self._masks: dict[int, int] = {}  # by key
        self._same: dict[int, int] = {}  # one object for equal masks
        self._free_bits: list[int] = []
        self._bits = 0
        self._sizes: Counter[int] = Counter()
        """Blocks of each block size."""
        self._size_of: dict[int, int] = {}
        self._orphans = 0

    def __repr__(self) -> str:
        return f"<BlockIndex {len(self._masks)} blocks of {len(self._holders)} sources, {self._orphans} orphans>"

    def __len__(self) -> int:
        """Different blocks."""
        return len(self._masks)
