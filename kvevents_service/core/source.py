"""One source of events that is not ours: an engine's own stream, made true enough to be announced in our journal.

Its batches go in, in order, with what `Sequencer` says of their numbers; announcements come out, parents before
children, each block once, and never a clear: what else stands in the journal is not the source's.

    told anew     doubt() ... apply ... settle(): only the difference is announced
    lost          lose(): nothing that was known can be known any more
    silent        hide() ... show(): announced as gone, and again when it is heard in unbroken order

What goes or comes back all at once is announced a slice at a time: the first with what made it so, the others by
`step`, as long as `settling`. Meanwhile the source may go on: a block that is stored again before its turn to go
stays.

References are counted as engines do: a block that was stored twice is gone when it was removed twice. A block whose
parent is not there waits, bounded, and is announced when the parent comes. What is announced is therefore what the
source holds, or less: `stats` says how much less and why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from kvevents_service.core.metadata import Announcement
from kvevents_service.core.residency import keys64
from kvevents_service.core.slots import NO_SLOT
from kvevents_service.core.source_cut import SHOWN, SourceCut
from kvevents_service.core.source_gone import Gone, removed_runs
from kvevents_service.core.source_groups import SourceGroups
from kvevents_service.core.source_holding import Holding, SourceLimits
from kvevents_service.core.source_store import stored
from kvevents_service.core.source_table import AWAY, FREE, ShelfName, SourceTable
from kvevents_service.core.source_visit import Untold, Visit
from kvevents_service.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvevents_service.wire.media import canonical_medium

COUNTED: Final = (
    *("stored", "removed", "cleared", "duplicates", "removed_unknown", "malformed", "not_its_own", "refused"),
    *("orphans_linked", "orphans_dropped", "doubted", "lost", "hidden"),
)
_REMOTE: Final = "REMOTE"


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
        self.counts: Counter[str] = Counter()
        self.holding = Holding(self.limits, self.counts)
        self.doubting = False
        self._untold: Untold | None = None

    def __repr__(self) -> str:
        state = "hidden " if self.hidden else "doubting " if self.doubting else ""
        return f"<StreamSource {state}{self.table!r}>"

    @property
    def table(self) -> SourceTable:
        return self.holding.table

    @property
    def hidden(self) -> bool:
        """Nothing of it is announced, or will be when it has settled."""
        return self.holding.hidden

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
            if len(self.table.waiting) > self.limits.orphans:
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
        """It has told all it has: what it did not tell goes."""
        if self.doubting:
            self.doubting = False
            self._untold = Untold(self.table, self.holding.telling)
        return self.step()

    def lose(self) -> tuple[Announcement, ...]:
        """Something is missing that will not be told: any block may be gone."""
        self.counts["lost"] += 1
        self._void()
        return self._said()

    def hide(self) -> tuple[Announcement, ...]:
        """Nobody is there to serve the blocks. They are remembered."""
        if not self.hidden:
            self.counts["hidden"] += 1
            self._turn(hidden=True)
        return self._said()

    def show(self) -> tuple[Announcement, ...]:
        """It is there again, and has missed nothing, or `lose` or `doubt` has said so."""
        if self.hidden:
            self._turn(hidden=False)
        return self._said()

    @property
    def settling(self) -> bool:
        """`step` has more to say."""
        return self._untold is not None or self.holding.turning is not None

    def step(self) -> tuple[Announcement, ...]:
        """The next slice of what goes or comes back."""
        self._step()
        return self._said()

    def cut(self) -> SourceCut:
        """What is announced now."""
        return self.table.cut()

    def shown_on(self, medium: str, group: int) -> int:
        """How many blocks of one tier and group are announced."""
        shelf = self.table.shelves.get(ShelfName(medium, group))
        return 0 if shelf is None else shelf.shown

    def shows(self, medium: str, group: int, key: int) -> bool:
        """Whether this block is announced."""
        shelf = self.table.shelves.get(ShelfName(medium, group))
        slot = None if shelf is None else shelf.held.get(key)
        return slot is not None and self.table.state[slot] == SHOWN

    def _said(self) -> tuple[Announcement, ...]:
        said = tuple(self.holding.out)
        self.holding.out.clear()
        return said

    # stores

    def _store(self, event: BlockStored) -> None:
        kind = self.groups.kind_of(event)
        if kind is not None and not self._is_its_own(event, kind.medium):
            return
        store = None if kind is None else stored(event, kind)
        if kind is None or store is None:
            self.counts["malformed"] += len(event.block_hashes) or 1
            return
        meta, keys = store
        if self._untold is not None:
            self._make_room(len(keys))
        self.holding.store(meta, keys, chained=kind.chained)

    def _make_room(self, blocks: int) -> None:
        """What is about to go goes at once, where it is in the way."""
        while self._untold is not None and len(self.table) + blocks > self.limits.blocks:
            self._step()

    def _is_its_own(self, event: BlockStored | BlockRemoved, medium: str) -> bool:
        if medium in self.others or event.locality == _REMOTE:
            self.counts["not_its_own"] += len(event.block_hashes)
            return False
        return True

    # removals

    def _remove(self, event: BlockRemoved) -> None:
        medium = canonical_medium(event.medium)
        if self._is_its_own(event, medium):
            shelf = self.table.shelves.get(ShelfName(medium, event.group_idx or 0))
            self.holding.remove(shelf, keys64(event.block_hashes))

    def _clear(self) -> None:
        self.counts["cleared"] += 1
        self._void()

    def _void(self) -> None:
        """What was told so far is not known to be so. In the middle of a telling that is seen at its end."""
        if self.doubting:
            self._doubt_all()
        else:
            self._forget_all()

    def _keep_bounds(self) -> None:
        waiting = self.table.waiting
        while len(waiting) > self.limits.orphans:
            self.counts["orphans_dropped"] += 1
            self.holding.drop(next(iter(waiting)))

    # what goes and comes back a slice at a time

    def _doubt_all(self) -> None:
        alive = self.holding.doubt()
        if self._untold is not None:
            self._untold.alive |= alive

    def _forget_all(self) -> None:
        """Nothing that was told so far is so any more."""
        self._doubt_all()
        if self._untold is None:
            self._untold = Untold(self.table, self.holding.telling)
        else:
            self._untold.alive, self._untold.again = {self.holding.telling}, True
        self._step()

    def _turn(self, *, hidden: bool) -> None:
        self.holding.hidden = hidden
        self.holding.turning = Visit(self.table, parents_first=not hidden)
        self._step()

    def _step(self) -> None:
        """What is to go goes first: it is not to come back."""
        if self._untold is not None:
            self._drop_untold(self._untold)
        if self._untold is None and self.holding.turning is not None:
            self._turn_some(self.holding.turning)
        self._keep_bounds()

    def _drop_untold(self, untold: Untold) -> None:
        table, gone = self.table, list[Gone]()
        for slot in untold.take(self.limits.slice_blocks):
            if table.state[slot] != FREE and table.seen[slot] not in untold.alive:
                gone += self.holding.drop(slot)
        self.holding.out += removed_runs(gone)
        if not untold:
            self._untold = Untold(table, self.holding.telling) if untold.again else None

    def _turn_some(self, visit: Visit) -> None:
        slots = visit.take(self.limits.slice_blocks)
        self.holding.out += (
            removed_runs(self._hidden(slots)) if self.hidden else self.table.runs_of(self._shown(slots))
        )
        if not visit:
            self.holding.turning = None

    def _hidden(self, slots: list[int]) -> Iterator[Gone]:
        table = self.table
        for slot in slots:
            if table.state[slot] == SHOWN:
                table.state[slot] = AWAY
                table.run(slot).shelf.shown -= 1
                yield self.holding.gone(slot)

    def _shown(self, slots: list[int]) -> Iterator[int]:
        table = self.table
        for slot in slots:
            parent = table.parent[slot]
            if table.state[slot] == AWAY and (parent == NO_SLOT or table.state[parent] == SHOWN):
                table.state[slot] = SHOWN
                table.run(slot).shelf.shown += 1
                yield slot

    # instruments

    def resident(self) -> dict[str, int]:
        """Blocks that are announced, by medium."""
        total: Counter[str] = Counter()
        for name, shelf in self.table.shelves.items():
            total[name.medium] += shelf.shown
        return dict(total)

    def stats(self) -> dict[str, int]:
        return {**{name: self.counts[name] for name in COUNTED}, "orphans": len(self.table.waiting)}

    def check(self) -> None:
        """Assert every internal invariant; for tests."""
        self.holding.check()
        assert len(self.table.waiting) <= self.limits.orphans
