"""Extra keys in the shapes that every reader takes.

Source: NVIDIA Dynamo (`kv-router`, zmq wire): an item is a string, a number, a boolean, or a pair of a string and
an integer (an image's hash and its offset). One item of any other shape and the whole batch is refused there.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import Any

import msgspec


def plain_extra_keys(extra_keys: list[Any] | None) -> list[list[object] | None] | None:
    """One entry per block, its items plain; an item of another shape is said as the hex SHA-256 of its MessagePack.

    Told apart is what matters to a router: blocks with unequal items keep unequal items.
    """
    return None if extra_keys is None else [entry and _plain_entry(entry) for entry in extra_keys]


def _plain_entry(entry: Iterable[object]) -> list[object]:
    return [item if _is_plain(item) else sha256(msgspec.msgpack.encode(item)).hexdigest() for item in entry]


def _is_plain(item: object) -> bool:
    if isinstance(item, tuple | list):
        return len(item) == 2 and isinstance(item[0], str) and _is_offset(item[1])
    return isinstance(item, str | int | float)


def _is_offset(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
