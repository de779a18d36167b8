"""Columns of numbers, one a slot, that cost nothing before they are used."""

from __future__ import annotations

from array import array
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from struct import calcsize
from typing import Final

from kvevents_service.wire.columns import numpy

MAPPED_BYTES: Final = 64 * 1024
"""Less is not worth a mapping of its own."""


def column(code: str, rows: int) -> memoryview[int]:
    """`rows` zeros of this format. The system gives the memory, page by page, when it is first written to."""
    size_bytes = calcsize(code) * rows
    zeros = (
        mmap(-1, size_bytes, MAP_PRIVATE | MAP_ANONYMOUS) if size_bytes >= MAPPED_BYTES else bytearray(size_bytes)
    )
    return memoryview(zeros).cast(code)  # type: ignore[call-overload,no-any-return]


def frozen(values: memoryview[int], rows: int) -> memoryview[int]:
    """The first rows of a column as they are now."""
    return memoryview(bytes(values[:rows])).cast(values.format)  # type: ignore[call-overload,no-any-return]


def count_set(flags: bytes | bytearray) -> int:
    """How many are not 0. `count` and `sum` are slow on many."""
    return len(flags.translate(None, b"\0"))


def extend_ramp(ramp: array[int], stop: int) -> None:
    """0, 1, 2, ... up to there. With numpy at the speed of memory."""
    if numpy is None:
        ramp.extend(range(len(ramp), stop))
    else:
        ramp.frombytes(numpy.arange(len(ramp), stop, dtype=ramp.typecode).tobytes())
