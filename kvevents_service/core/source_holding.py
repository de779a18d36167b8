"""What a source holds: blocks come, come again and go; what is to be announced of that is in `out`.

References are counted as engines do. A block whose parent is not held waits, and comes with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from kvevents_service.core.metadata import Announcement, BlockStoreMeta
from kvevents_service.core.residency import key64
from kvevents_service.core.slots import NO_SLOT
from kvevents_service.core.source_cut import SHOWN
from kvevents_service.core.source_gone import Gone, removed_runs
from kvevents_service.core.source_table import AWAY, WAITING, Shelf, SourceTable
from kvevents_service.core.source_visit import Visit

_TELLINGS: Final = 256


class SourceLimits(NamedTuple):
    """Bounds of one source: blocks that it holds, of them those that wait for a parent, and how many are looked at
    in one step."""

    blocks: int = 4_000_000
    orphans: int = 65_536
    slice_blocks: int = 128


class Holding:
    """hidden: blocks that come are not announced. turning: announces what is AWAY, if it is not hidden.

    telling: what comes is told in this one; see `SourceTable.seen`. counts: what happened, by name.
    """

    def __init__(self, limits: SourceLimits, counts: Counter[str]) -> None:
        self.limits = limits
        self.counts = counts
        self.table = SourceTable()
        self.out: list[Announcement] = []
        self.hidden = False
        self.turning: Visit | None = None
        self.telling = 0
        self.again: Counter[int] = Counter()
        """Slots that were stored more than once: how often more."""

    def __repr__(self) -> str:
        return f"<Holding {self.table!r}>"

    def store(self, meta: BlockStoreMeta, keys: list[int], *, chained: bool) -> None:
        """Blocks of one run, by their keys. chained: each needs the one before it."""
        shelf = self.table.shelf(meta.medium, meta.group.index)
        if shelf.is_fresh(keys):
            self._add(shelf, meta, keys, chained)
        else:
            self._add_around(shelf, meta, keys, chained)

    def _add_around(self, shelf: Shelf, meta: BlockStoreMeta, keys: list[int], chained: bool) -> None:
        """Some of the blocks are held already."""
        start, fresh = 0, set[int]()
        for place, key in enumerate([*keys, None]):
            if key is not None and key not in fresh and key not in shelf.held:
                fresh.add(key)
                continue
            if start < place:
                self._add(shelf, meta.part(start, place), keys[start:place], chained)
            if key is not None:
                self._add_again(shelf.held.get(key))
            start, fresh = place + 1, set()

    def _add_again(self, slot: int | None) -> None:
        if slot is None:  # there was no room for it
            return
        if self.table.seen[slot] != self.telling:
            self.table.seen[slot] = self.telling
            self.again.pop(slot, None)
            return
        self.again[slot] += 1
        self.counts["duplicates"] += 1

    def _add(self, shelf: Shelf, meta: BlockStoreMeta, keys: list[int], chained: bool) -> None:
        """Blocks none of which is held."""
        table, before = self.table, meta.parent_block_hash
        if len(table) + len(keys) > self.limits.blocks:
            self.counts["refused"] += len(keys)
            return
        self.counts["stored"] += len(keys)
        parent_key = None if before is None else key64(before)
        parent = NO_SLOT if parent_key is None else shelf.held.get(parent_key)
        if parent is not None and parent != NO_SLOT:
            meta = self._named_alike(meta, parent)
        state = self._state_behind(parent if chained else NO_SLOT)
        slots = table.fill(shelf, meta, state, self.telling, NO_SLOT if parent is None else parent)
        shelf.held.update(zip(keys, slots, strict=True))
        if chained and parent_key is not None:
            self._link(shelf, slots[0], parent, parent_key)
        if chained and len(slots) > 1:
            table.chain(slots)
        if state == SHOWN:
            shelf.shown += len(slots)
            self.out.append(meta)
        elif state == WAITING:
            table.waiting.update(dict.fromkeys(slots))
        else:
            self._come_later(slots)
        if shelf.missing:
            for key, slot in zip(keys, slots, strict=True):
                self._adopt(shelf, key, slot)

    def _named_alike(self, meta: BlockStoreMeta, parent: int) -> BlockStoreMeta:
        """The parent's name is the one it was stored by, however this store writes it."""
        if len(meta.parent_block_hash or b"") == self.table.run(parent).hash_bytes:
            return meta
        return replace(meta, parent_block_hash=self.table.hash_of(parent))

    def _state_behind(self, parent: int | None) -> int:
        """What a block is behind this one: NO_SLOT, as it needs none; None, as it is not held."""
        before = SHOWN if parent == NO_SLOT else WAITING if parent is None else self.table.state[parent]
        return AWAY if before == SHOWN and self.hidden else before

    def _link(self, shelf: Shelf, slot: int, parent: int | None, parent_key: int) -> None:
        if parent is None:
            shelf.missing.setdefault(parent_key, {})[slot] = None
        else:
            self.table.link(slot, parent)

    def _come_later(self, slots: Sequence[int]) -> None:
        if not self.hidden and self.turning is not None:
            self.turning.add(slots)

    def _adopt(self, shelf: Shelf, key: int, slot: int) -> None:
        """What waited for this block."""
        table, state = self.table, self.table.state[slot]
        for child in shelf.missing.pop(key, ()):
            if table.root(slot) == child:  # no prompt goes round in a circle
                self.counts["malformed"] += 1
                shelf.missing.setdefault(key, {})[child] = None
                self.drop(child)
                continue
            table.link(child, slot)
            if not table.position[child]:
                table.run(child).parent_block_hash = table.hash_of(slot)
            if state != WAITING:
                found = table.subtree(child)
                table.wait_no_more(shelf, found, state)
                self.counts["orphans_linked"] += len(found)
                if state == SHOWN:
                    self.out += table.runs_of(found)
                else:
                    self._come_later(found)

    # what goes

    def remove(self, shelf: Shelf | None, keys: Iterable[int]) -> None:
        """Each of them once."""
        held = {} if shelf is None else shelf.held
        gone: list[Gone] = []
        for key in keys:
            slot = held.get(key)
            if slot is None:
                self.counts["removed_unknown"] += 1
            elif slot in self.again and self.table.seen[slot] == self.telling:
                self._remove_one(slot)
            else:
                self.counts["removed"] += 1
                gone += self.drop(slot)
        self.out += removed_runs(gone)

    def _remove_one(self, slot: int) -> None:
        self.again[slot] -= 1
        if not self.again[slot]:
            del self.again[slot]

    def drop(self, slot: int) -> list[Gone]:
        """The source does not hold it any more. What is behind it waits. Returns what was shown, leaves first."""
        table, key, gone = self.table, self.table.key_of(slot), list[Gone]()
        shelf = table.run(slot).shelf
        for child in table.children(slot):
            if table.state[child] != WAITING:
                found = table.subtree(child)
                gone += [self.gone(one) for one in reversed(found) if table.state[one] == SHOWN]
                table.wait(shelf, found)
            table.unlink(child)
            shelf.missing.setdefault(key, {})[child] = None
        if table.state[slot] == SHOWN:
            gone.append(self.gone(slot))
            shelf.shown -= 1
        elif table.state[slot] == WAITING:
            del table.waiting[slot]
            table.stop_missing(shelf, slot)
        del shelf.held[key]
        table.unlink(slot)
        table.release(slot)
        self.again.pop(slot, None)
        return gone

    def gone(self, slot: int) -> Gone:
        return Gone(self.table.run(slot), self.table.position[slot])

    def doubt(self) -> set[int]:
        """Another telling begins; the tellings that a block may be of from now on and is still held."""
        self.telling = (self.telling + 1) % _TELLINGS
        if self.telling:
            return {self.telling}
        self.table.seen[:] = bytes(len(self.table.seen))
        self.telling = 1
        return {0, 1}

    def check(self) -> None:
        """Assert every internal invariant; for tests."""
        self.table.check()
        assert all(self.table.runs[slot] is not None and more > 0 for slot, more in self.again.items())
        if self.turning is None:
            assert (SHOWN if self.hidden else AWAY) not in self.table.state
