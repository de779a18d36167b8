"""Extra keys in the shapes that every reader takes.

Source: NVIDIA Dynamo (`kv-router`, zmq wire): an item is a string, a number, a boolean, or a pair of a string and
an integer (an image's hash and its offset). One item of any other shape and the whole batch is refused there.
"""

from __future__ import annotations

from hashlib import sha256
from itertools import chain
from typing import Any, Final

import msgspec

MAX_DEPTH: Final = 32
_NESTED: Final = (list, tuple, dict)


def plain_extra_keys(extra_keys: list[Any] | None) -> list[list[object] | None] | None:
    """One entry per block, its items plain; an item of another shape is said as the hex SHA-256 of its MessagePack.
    An entry that is no list is its only item.

    Told apart is what matters to a router: blocks with unequal items keep unequal items.
    """
    return None if extra_keys is None else [None if entry is None else _plain_entry(entry) for entry in extra_keys]


def is_deep(extra_keys: list[Any]) -> bool:
    """Whether anything in them is nested over MAX_DEPTH levels.

    How much a decoder takes is the interpreter's affair, and more than there is stack for to take it apart.
    """
    level: list[object] = extra_keys
    for _ in range(MAX_DEPTH):
        level = [item for value in level if isinstance(value, _NESTED) for item in _inside(value)]
        if not level:
            return False
    return True


def _inside(value: Any) -> Any:
    return chain(value, value.values()) if isinstance(value, dict) else value


def _plain_entry(entry: object) -> list[object]:
    items = entry if isinstance(entry, list | tuple) else (entry,)
    return [item if _is_plain(item) else sha256(msgspec.msgpack.encode(item)).hexdigest() for item in items]


def _is_plain(item: object) -> bool:
    if isinstance(item, tuple | list):
        return len(item) == 2 and isinstance(item[0], str) and _is_offset(item[1])
    return isinstance(item, str | int | float)


def _is_offset(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
