"""Columns of numbers, one a slot, that cost nothing before they are used."""

from __future__ import annotations

from array import array
from struct import calcsize

from kvevents_service.wire.columns import numpy


def column(code: str, rows: int) -> memoryview[int]:
    """`rows` zeros of this format. The system gives the memory, page by page, when it is first written to."""
    return memoryview(bytearray(calcsize(code) * rows)).cast(code)  # type: ignore[call-overload,no-any-return]


def frozen(values: memoryview[int], rows: int) -> memoryview[int]:
    """The first rows of a column as they are now."""
    return memoryview(bytes(values[:rows])).cast(values.format)  # type: ignore[call-overload,no-any-return]


def extend_ramp(ramp: array[int], stop: int) -> None:
    """0, 1, 2, ... up to there. With numpy at the speed of memory."""
    if numpy is None:
        ramp.extend(range(len(ramp), stop))
    else:
        ramp.frombytes(numpy.arange(len(ramp), stop, dtype=ramp.typecode).tobytes())
