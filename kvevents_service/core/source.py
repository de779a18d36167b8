"""One source of events that is not ours: an engine's own stream, made true enough to be announced in our journal.

Its batches go in, in order, with what `Sequencer` says of their numbers; announcements come out, parents before
children, each block once, and never a clear: what else stands in the journal is not the source's.

    told anew     doubt() ... apply ... settle(): only the difference is announced
    lost          lose(): nothing that was known can be known any more
    silent        hide() ... show(): announced as gone, and again when it is heard in unbroken order

References are counted as engines do: a block that was stored twice is gone when it was removed twice. A block whose
parent is not there waits, bounded, and is announced when the parent comes. What is announced is therefore what the
source holds, or less: `stats` says how much less and why.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple

from kvevents_service.core.cut import PoolCut
from kvevents_service.core.groups import PREFIX_KINDS
from kvevents_service.core.metadata import Announcement, BlockStoreMeta
from kvevents_service.core.residency import key64, keys64
from kvevents_service.core.slots import NO_SLOT
from kvevents_service.core.source_gone import Gone, all_removed, removed_runs
from kvevents_service.core.source_groups import SourceGroups
from kvevents_service.core.source_store import stored_meta
from kvevents_service.core.source_table import SHOWN, WAITING, Shelf, ShelfName, SourceTable
from kvevents_service.core.source_untold import SLICE, Untold
from kvevents_service.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvevents_service.wire.media import canonical_medium

COUNTED: Final = (
    *("stored", "removed", "cleared", "duplicates", "removed_unknown", "malformed", "not_its_own", "refused"),
    *("orphans_linked", "orphans_dropped", "doubted", "lost", "hidden"),
)
_REMOTE: Final = "REMOTE"
_TELLINGS: Final = 256


class SourceLimits(NamedTuple):
    """Bounds of one source: blocks that it holds, and of them those that wait for a parent."""

    blocks: int = 4_000_000
    orphans: int = 65_536


class StreamSource:
    """What one source holds. `others`: media that are not the source's to speak of, as they are tiers of ours.

    block_size: tokens of its main group's blocks, where known. No I/O, no clock; a `StateSource`.
    """

    def __init__(
        self, *, block_size: int = 0, others: frozenset[str] = frozenset(), limits: SourceLimits | None = None
    ) -> None:
        self.limits = limits or SourceLimits()
        self.others = others
        self.groups = SourceGroups(block_size)
        self.table = SourceTable()
        self.counts: Counter[str] = Counter()
        self.hidden = self.doubting = False
        self._telling = 0
        self._untold: Untold | None = None
        self._again: Counter[int] = Counter()
        """Slots that were stored more than once: how often more."""
        self._out: list[Announcement] = []

    def __repr__(self) -> str:
        state = "hidden " if self.hidden else "doubting " if self.doubting else ""
        return f"<StreamSource {state}{self.table!r}>"

    # the stream

    def apply(self, events: Iterable[Event]) -> tuple[Announcement, ...]:
        """Fold one batch; what is to be announced of it."""
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    self._remove(event)
                case AllBlocksCleared():
                    self._clear()
            self._keep_bounds()
        return self._said()

    def doubt(self) -> tuple[Announcement, ...]:
        """The source tells its state anew, from its start or in whole: what it does not tell again is to go."""
        if self.hidden:
            return self.lose()
        self.counts["doubted"] += 1
        self._doubt_all()
        self.doubting = True
        return ()

    def settle(self) -> tuple[Announcement, ...]:
        """It has told all it has. What is to go goes a slice at a time: call it again while `settling`."""
        if self.doubting:
            self.doubting = False
            if self._telling in self.table.seen:
                self._untold = Untold(self.table, self._telling)
            else:
                self._forget_all()
        for _ in range(SLICE if self._untold is not None else 0):
            self._drop_one_untold()
        self._keep_bounds()
        return self._said()

    @property
    def settling(self) -> bool:
        """`settle` has more to say."""
        return self._untold is not None

    def lose(self) -> tuple[Announcement, ...]:
        """Something is missing that will not be told: any block may be gone."""
        self.counts["lost"] += 1
        self.doubting = False
        self._forget_all()
        return self._said()

    def hide(self) -> tuple[Announcement, ...]:
        """Nobody is there to serve the blocks. They are remembered."""
        if not self.hidden:
            self.counts["hidden"] += 1
            self._say_all_gone()
        said = self._said()
        self.hidden = True
        return said

    def show(self) -> tuple[Announcement, ...]:
        """It is there again, and has missed nothing, or `lose` or `doubt` has said so."""
        if self.hidden:
            self.hidden = False
            self._out += self.table.cut().runs()
        return self._said()

    def cut(self) -> PoolCut:
        """What is announced now."""
        return PoolCut([], [], {}, b"", [], array("i")) if self.hidden else self.table.cut()

    def _said(self) -> tuple[Announcement, ...]:
        said, self._out = tuple(self._out), []
        return () if self.hidden else said

    # stores

    def _store(self, event: BlockStored) -> None:
        medium = canonical_medium(event.medium)
        if not self._is_its_own(event, medium):
            return
        spec = self.groups.spec_of(event)
        inner = spec is not None and self.groups.is_inner(spec)
        meta = None if spec is None else stored_meta(event, spec, medium, inner=inner)
        if meta is None:
            self.counts["malformed"] += len(event.block_hashes) or 1
            return
        shelf, keys = self.table.shelf(medium, meta.group.index), keys64(event.block_hashes)
        if shelf.is_fresh(keys):
            self._add(shelf, meta, keys)
        else:
            self._add_around(shelf, meta, keys)

    def _is_its_own(self, event: BlockStored | BlockRemoved, medium: str) -> bool:
        own = medium not in self.others and event.locality != _REMOTE
        self.counts["not_its_own"] += 0 if own else len(event.block_hashes)
        return own

    def _add_around(self, shelf: Shelf, meta: BlockStoreMeta, keys: list[int]) -> None:
        """Some of the blocks are held already."""
        start, fresh = 0, set[int]()
        for place, key in enumerate(keys):
            if key not in fresh and shelf.find(key) is None:
                fresh.add(key)
                continue
            self._add_part(shelf, meta, keys, start, place)
            self._add_again(shelf.find(key))
            start, fresh = place + 1, set()
        self._add_part(shelf, meta, keys, start, len(keys))

    def _add_part(self, shelf: Shelf, meta: BlockStoreMeta, keys: list[int], start: int, stop: int) -> None:
        if start < stop:
            self._add(shelf, meta.part(start, stop), keys[start:stop])

    def _add_again(self, slot: int | None) -> None:
        if slot is None:  # there was no room for it
            return
        if self.table.seen[slot] != self._telling:
            self.table.seen[slot] = self._telling
            self._again.pop(slot, None)
            return
        self._again[slot] += 1
        self.counts["duplicates"] += 1

    def _add(self, shelf: Shelf, meta: BlockStoreMeta, keys: list[int]) -> None:
        """Blocks none of which is held."""
        if len(self.table) + len(keys) > self.limits.blocks:
            self.counts["refused"] += len(keys)
            return
        self.counts["stored"] += len(keys)
        chained = meta.group.kind in PREFIX_KINDS and not meta.inner
        parent_key = None if meta.parent_block_hash is None or not chained else key64(meta.parent_block_hash)
        parent = NO_SLOT if parent_key is None else shelf.find(parent_key)
        shown = parent is not None and (parent == NO_SLOT or self.table.state[parent] == SHOWN)
        slots = self.table.fill(meta, SHOWN if shown else WAITING, self._telling)
        self._index(shelf, keys, slots, shown=shown)
        if chained:
            self.table.chain(slots)
            self._place(shelf, slots[0], parent, parent_key)
        if shown:
            self._out.append(meta)
        if shelf.missing:
            for key, slot in zip(keys, slots, strict=True):
                self._adopt(shelf, key, slot)

    def _index(self, shelf: Shelf, keys: list[int], slots: list[int], *, shown: bool) -> None:
        (shelf.shown if shown else shelf.waiting).update(zip(keys, slots, strict=True))
        if not shown:
            self.table.waiting.update(dict.fromkeys(slots))

    def _place(self, shelf: Shelf, slot: int, parent: int | None, parent_key: int | None) -> None:
        if parent is None and parent_key is not None:
            shelf.missing.setdefault(parent_key, {})[slot] = None
        elif parent is not None and parent != NO_SLOT:
            self.table.link(slot, parent)

    def _adopt(self, shelf: Shelf, key: int, slot: int) -> None:
        """What waited for this block."""
        table = self.table
        for child in shelf.missing.pop(key, ()):
            if table.root(slot) == child:  # no prompt goes round in a circle
                self.counts["malformed"] += 1
                shelf.missing.setdefault(key, {})[child] = None
                self._drop(shelf, child)
                continue
            table.link(child, slot)
            if table.state[slot] == SHOWN:
                found = table.subtree(child)
                table.show(shelf, found)
                self.counts["orphans_linked"] += len(found)
                self._out += table.runs(found)

    # removals

    def _remove(self, event: BlockRemoved) -> None:
        medium = canonical_medium(event.medium)
        if not self._is_its_own(event, medium):
            return
        shelf = self.table.shelves.get(ShelfName(medium, event.group_idx or 0))
        gone: list[Gone] = []
        for key in keys64(event.block_hashes):
            slot = None if shelf is None else shelf.find(key)
            if shelf is None or slot is None:
                self.counts["removed_unknown"] += 1
            elif slot in self._again and self.table.seen[slot] == self._telling:
                self._remove_one(slot)
            else:
                self.counts["removed"] += 1
                gone += self._drop(shelf, slot)
        self._out += removed_runs(gone)

    def _remove_one(self, slot: int) -> None:
        self._again[slot] -= 1
        if not self._again[slot]:
            del self._again[slot]

    def _drop(self, shelf: Shelf, slot: int) -> list[Gone]:
        """The source does not hold it any more. What is behind it waits. Returns what was shown, leaves first."""
        table, key, gone = self.table, self.table.key_of(slot), list[Gone]()
        for child in table.children(slot):
            if table.state[child] == SHOWN:
                found = table.subtree(child)
                gone += map(self._gone, reversed(found))
                table.hide(shelf, found)
            table.unlink(child)
            shelf.missing.setdefault(key, {})[child] = None
        if table.state[slot] == SHOWN:
            gone.append(self._gone(slot))
            del shelf.shown[key]
        else:
            del shelf.waiting[key], table.waiting[slot]
            table.stop_missing(shelf, slot)
        table.unlink(slot)
        table.release(slot)
        self._again.pop(slot, None)
        return gone

    def _drop_one_untold(self) -> None:
        found = None if self._untold is None else self._untold.next()
        if found is None:
            self._untold = None
        else:
            self._out += removed_runs(self._drop(*found))

    def _clear(self) -> None:
        self.counts["cleared"] += 1
        if self.doubting:
            self._doubt_all()
        else:
            self._forget_all()

    def _doubt_all(self) -> None:
        self._untold = None
        self._telling = (self._telling + 1) % _TELLINGS
        if not self._telling:
            self.table.seen[:] = bytes(len(self.table.seen))
            self._telling = 1

    def _forget_all(self) -> None:
        self._say_all_gone()
        self.table = SourceTable()
        self._untold = None
        self._again.clear()

    def _keep_bounds(self) -> None:
        waiting = self.table.waiting
        while len(waiting) > self.limits.orphans:
            self.counts["orphans_dropped"] += 1
            slot = next(iter(waiting))
            self._drop(self.table.shelf_of(slot), slot)

    # what is said

    def _gone(self, slot: int) -> Gone:
        return Gone(self.table.meta(slot), self.table.hash_of(slot))

    def _say_all_gone(self) -> None:
        self._out += all_removed(self.table.cut().runs())

    # instruments

    def resident(self) -> dict[str, int]:
        """Blocks that are announced, by medium."""
        total: Counter[str] = Counter()
        for name, shelf in self.table.shelves.items():
            total[name.medium] += 0 if self.hidden else len(shelf.shown)
        return dict(total)

    def stats(self) -> dict[str, int]:
        return {**{name: self.counts[name] for name in COUNTED}, "orphans": len(self.table.waiting)}

    def check(self) -> None:
        """Assert every internal invariant; for tests."""
        self.table.check()
        assert len(self.table.waiting) <= self.limits.orphans
        assert all(self.table.metas[slot] is not None and more > 0 for slot, more in self._again.items())
