"""The token ids of a store, as they came: read on first use, for most readers never do.

That they are an array, whole, of how many values and the first of them an int is known before; that every value is
an int only when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, overload

import msgspec

from kvevents_service.errors import WireError

_HEADERS: Final = {0xDC: 3, 0xDD: 5}
"""Bytes of the header of an array, by its format code; of a small one it is the code alone."""
_INTS: Final = frozenset([*range(0x80), *range(0xCC, 0xD4), *range(0xE0, 0x100)])
_FOREIGN: Final = (ValueError, TypeError, OverflowError)

_decoder: Final = msgspec.msgpack.Decoder(list[int])
_loose: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])


class TokenIds(Sequence[int]):
    """As the list of them: equal to it, shown as it, and a list once pickled or copied. Its length is free.

    Until it is read it keeps the whole message that it came in. Whatever reads a value raises WireError (field
    "token_ids[i]") if one is no int. For encoders that take only what they know, such as msgspec's and json's:
    `enc_hook=list`, `default=list`.
    """

    __slots__ = ("_count", "_raw", "_values")

    def __init__(self, raw: msgspec.Raw) -> None:
        """ValueError for what is no array, or one whose first value is no int."""
        self._raw: msgspec.Raw | None = raw
        self._values: list[int] = []
        self._count = _checked_count(memoryview(raw))

    def read(self) -> list[int]:
        """The list itself: not to be changed."""
        raw = self._raw
        if raw is not None:
            try:
                self._values = _decoder.decode(raw)
            except _FOREIGN:
                raise WireError(f"token_ids[{_first_odd(raw)}]", "int") from None
            self._raw = None
        return self._values

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return iter(self.read())

    def __reversed__(self) -> Iterator[int]:
        return reversed(self.read())

    def __contains__(self, value: object) -> bool:
        return value in self.read()

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> list[int]: ...
    def __getitem__(self, place: int | slice) -> int | list[int]:
        return self.read()[place]

    def __add__(self, other: object) -> list[int]:
        return self.read() + _values(other) if isinstance(other, list | TokenIds) else NotImplemented

    def __radd__(self, other: object) -> list[int]:
        return other + self.read() if isinstance(other, list) else NotImplemented

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list | TokenIds):
            return NotImplemented
        return len(self) == len(other) and self.read() == _values(other)

    __hash__ = None  # type: ignore[assignment]  # as a list

    def __repr__(self) -> str:
        return repr(self.read())

    def __reduce__(self) -> tuple[Callable[..., list[int]], tuple[list[int]]]:
        return list, (self.read(),)


def _values(tokens: list[int] | TokenIds) -> list[int]:
    return tokens.read() if isinstance(tokens, TokenIds) else tokens


def _checked_count(data: memoryview) -> int:
    code = data[0]
    if 0x90 <= code <= 0x9F:
        start, count = 1, code & 0x0F
    else:
        start = _HEADERS.get(code, 0)
        count = int.from_bytes(data[1:start], "big")
    if not start or (count and data[start] not in _INTS):
        raise ValueError("an array of ints")
    return count


def _first_odd(raw: msgspec.Raw) -> int:
    """Where the first value is that is no int."""
    return next(place for place, value in enumerate(_loose.decode(raw)) if memoryview(value)[0] not in _INTS)
