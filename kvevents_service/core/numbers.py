"""The numbers an output says: the journal's, or lower ones once the output was re-based.

A router that takes a late join only from number 0 on cannot be served at number 1,000,000. Its output starts again:

    journal  1000000  1000001 | 1000002  1000003  1000004     (re-based before 1000002)
    output   1000000  1000001 |       1        2        3

A reader that sees 1 after a higher number knows a publisher that started anew: it forgets, misses 0, asks from
there, and gets a snapshot. From then on a number has meant two batches, so no start can be trusted: every answer is
a snapshot. (A reader that heard nothing since number 1, the last time, takes the new 1 for a repeat.)
"""

from __future__ import annotations

from typing import Final, NamedTuple

FIRST_AGAIN: Final = 1
_KEPT_BASES: Final = 8
"""Bases of batches that are numbered and not sent yet; a base holds for thousands of numbers."""


class _Base(NamedTuple):
    from_seq: int
    base: int


class OutputNumbers:
    """Maps numbers of the journal to those of one output and back."""

    def __init__(self) -> None:
        self._bases = [_Base(0, 0)]
        self.rebased = 0

    def __repr__(self) -> str:
        return f"<OutputNumbers base={self.base} rebased={self.rebased}>"

    @property
    def base(self) -> int:
        """The newest: what every answer is numbered by."""
        return self._bases[-1].base

    def outward(self, seq: int) -> int:
        """What the output says for a number of the journal."""
        for from_seq, base in reversed(self._bases):
            if seq >= from_seq:
                return seq - base
        return seq - self._bases[0].base

    def inward(self, number: int) -> int:
        """The number of the journal that a reader means, by what is said now."""
        return number + self.base

    def rebase(self, next_seq: int) -> None:
        """The next batch is numbered FIRST_AGAIN, those after it go on from there."""
        self._bases.append(_Base(next_seq, next_seq - FIRST_AGAIN))
        del self._bases[:-_KEPT_BASES]
        self.rebased += 1
