"""Stretches: slots in a row that hold a chain, and the runs in each, seen in packed columns at once.

In a stretch all are READY, and each but the first is the child of the one before it, or linked to none and at the
position behind it. In a run each position follows the one before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from kvevents_service.core.slots import NO_SLOT, READY
from kvevents_service.wire.columns import numpy

_NONE, _STRETCH, _RUN, _LOOSE, _MORE = range(5)
"""What a slot is: not READY, the first of a stretch, the first of a further run; behind another without a link to
it, or its child, at the next position."""
_REST_OF_STRETCH: Final = re.compile(b"[%c-%c]*" % (_RUN, _MORE))
_FIRST_OF_RUN: Final = re.compile(b"[%c%c]" % (_STRETCH, _RUN))
_STEP: Final = 1 << 16
"""Slots looked at in one step: columns of so many stay in the cache."""


class Stretches(NamedTuple):
    """What each slot is, a byte each."""

    kinds: bytes

    @classmethod
    def of(cls, state: bytes, positions: memoryview[int], parents: memoryview[int]) -> Stretches:
        """A millisecond for a million slots with numpy, a third of a second without."""
        if numpy is None:
            return cls(_by_slot(state, positions, parents))
        state_of, position_of, parent_of = (
            numpy.frombuffer(column, code) for column, code in ((state, "u1"), (positions, "i4"), (parents, "i4"))
        )
        steps = range(0, len(state), _STEP)
        return cls(b"".join(_by_numpy(state_of, position_of, parent_of, start) for start in steps))

    def parents_first(self, parents: memoryview[int]) -> Iterator[tuple[int, int]]:
        """Every stretch, as its first slot and the one behind its last. From the highest down, each behind all
        before it that were not told yet: of chains that grew together each is told by itself."""
        told = bytearray(len(self.kinds))
        start = len(told)
        while (start := self.kinds.rfind(_STRETCH, 0, start)) >= 0:
            chain, at = [], start
            while at >= 0 and not told[at]:
                told[at] = True
                chain.append(at)
                if parents[at] != NO_SLOT:
                    at = self.kinds.rfind(_STRETCH, 0, parents[at] + 1)
            for at in reversed(chain):
                yield at, self._end(at)

    def _end(self, start: int) -> int:
        match = _REST_OF_STRETCH.match(self.kinds, start + 1)
        return len(self.kinds) if match is None else match.end()

    def runs(self, start: int, stop: int) -> list[int]:
        """The first slots of the runs of a stretch."""
        return [match.start() for match in _FIRST_OF_RUN.finditer(self.kinds, start, stop)]

    def is_run(self, start: int, stop: int) -> bool:
        """Whether no run starts between these slots of a stretch."""
        return self.kinds.find(_RUN, start + 1, stop) < 0

    def is_linked(self, start: int, stop: int) -> bool:
        """Whether each block of the stretch is the parent of the next."""
        return self.kinds.find(_LOOSE, start, stop) < 0


def _by_numpy(state: Any, positions: Any, parents: Any, start: int) -> bytes:
    """The kinds of _STEP slots from there on."""
    stop, first = min(start + _STEP, len(state)), max(start, 1)
    ready = state[first - 1 : stop] == READY
    place, parent = positions[first - 1 : stop], parents[first:stop]
    follows = place[1:] == place[:-1] + 1
    child = parent == numpy.arange(first - 1, stop - 1, dtype="i4")
    both = ready[1:] & ready[:-1]
    kinds = (state[start:stop] == READY).astype("u1")
    kinds[first - start :] += (both & child) * numpy.uint8(_RUN - _STRETCH)
    kinds[first - start :] += (both & child & follows) * numpy.uint8(_MORE - _RUN)
    kinds[first - start :] += (both & follows & (parent == NO_SLOT)) * numpy.uint8(_LOOSE - _STRETCH)
    return bytes(kinds)


def _by_slot(state: bytes, positions: memoryview[int], parents: memoryview[int]) -> bytes:
    kinds = bytearray(len(state))
    for slot in (slot for slot, its_state in enumerate(state) if its_state == READY):
        kinds[slot] = _STRETCH
        if slot and kinds[slot - 1]:
            follows = positions[slot] == positions[slot - 1] + 1
            if parents[slot] == slot - 1:
                kinds[slot] = _MORE if follows else _RUN
            elif follows and parents[slot] == NO_SLOT:
                kinds[slot] = _LOOSE
    return bytes(kinds)
