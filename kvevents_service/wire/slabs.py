"""Memory that payloads are put together in, side by side: to take it piece by piece costs more than to fill it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvevents_service.wire.columns import numpy

FIRST_BYTES: Final = 256 * 1024
MOST_BYTES: Final = 16 * 1024 * 1024
"""Of one slab, if no payload is larger. From 4 MiB on numpy asks for huge pages."""


class Slabs:
    """Each twice as large as the one before. One lives as long as a payload in it."""

    def __init__(self) -> None:
        self._room = memoryview(bytearray())
        self._bytes = FIRST_BYTES // 2

    def joined(self, pieces: Sequence[bytes | memoryview]) -> memoryview:
        """The pieces, in order, read-only."""
        size = sum(map(len, pieces))
        if size > len(self._room):
            self._bytes = min(2 * self._bytes, MOST_BYTES)
            self._room = _fresh(max(size, self._bytes))
        payload, self._room = self._room[:size], self._room[size:]
        at = 0
        for piece in pieces:
            payload[at : at + len(piece)] = piece
            at += len(piece)
        return payload.toreadonly()


def _fresh(size: int) -> memoryview:
    return memoryview(bytearray(size) if numpy is None else numpy.empty(size, numpy.uint8))
