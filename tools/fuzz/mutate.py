"""Odd values, and what they do to a message: trees of msgpack values, and plain bytes."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

Tree = list[Any]
INTS = (
    0,
    -1,
    1,
    2,
    63,
    64,
    65,
    255,
    65_536,
    2**31 - 1,
    2**31,
    -(2**31),
    2**32,
    2**53,
    2**63 - 1,
    2**64 - 1,
    -(2**63),
)
FLOATS = (0.0, -1.0, 1e-308, 1e308, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "r", "engine", "worker", "observer", "healthy", "full_attention", "mamba", "\0", "../x", "x" * 4096)
LONG_LIST = 70_000
RARE = 4000
DEEP = 600


def odd_value(random: Random) -> Any:
    return random.choice(_KINDS)(random)


def _rare_value(random: Random) -> Any:
    if random.randrange(RARE) == 0:
        return [random.choice(INTS)] * LONG_LIST
    if random.randrange(40) == 0:
        return _nested(DEEP)
    return {random.choice(TEXTS[:4]): random.choice(INTS)}


def _nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def _odd_bytes(random: Random) -> bytes:
    return random.randbytes(random.choice((0, 1, 4, 31, 32, 33, 64, 500)))


_KINDS: tuple[Callable[[Random], Any], ...] = (
    *[lambda random: random.choice(INTS)] * 3,
    *[_odd_bytes] * 2,
    lambda random: random.choice(FLOATS),
    lambda random: random.choice(TEXTS),
    lambda random: random.choice((None, True, False)),
    lambda random: [odd_value(random) for _ in range(random.randrange(4))],
    _rare_value,
)


def mutate_tree(tree: Tree, random: Random) -> Tree:
    """One or a few places of a message changed: replaced, taken out, doubled, exchanged."""
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        place = _place(tree, random)
        if not place:
            place.append(odd_value(random))
            continue
        at = random.randrange(len(place))
        match random.randrange(8):
            case 0:
                del place[at]
            case 1:
                place.insert(at, odd_value(random))
            case 2:
                place.insert(at, place[at])
            case 3:
                other = random.randrange(len(place))
                place[at], place[other] = place[other], place[at]
            case _:
                place[at] = _changed(place[at], random)
    return tree


def nudge_tree(tree: Tree, random: Random) -> Tree:
    """Numbers and bytes inside changed, their kinds kept: it is understood, and wrong all the same."""
    for _ in range(random.choice((1, 1, 2, 3))):
        place = _place(tree, random)
        at = random.randrange(len(place)) if place else 0
        if place and isinstance(place[at], int | bytes) and not isinstance(place[at], bool):
            place[at] = _near(place[at], random)
    return tree


def _near(value: int | bytes, random: Random) -> int | bytes:
    if isinstance(value, bytes):
        return random.choice((mutate_bytes(value, random), value[4:], value * 2, value[:-32]))
    near = max(-(2**63), min(value + random.choice((-1, 1, 1000)), 2**64 - 1))
    return random.choice((near, near, random.choice(INTS)))


def _place(tree: Tree, random: Random) -> Tree:
    """A list somewhere inside."""
    while inner := [item for item in tree if isinstance(item, list)]:
        if random.randrange(3) == 0:
            break
        tree = random.choice(inner)
    return tree


def _changed(value: Any, random: Random) -> Any:
    """A near miss of it, or something else altogether."""
    if random.randrange(2) and isinstance(value, int | bytes) and not isinstance(value, bool):
        return _near(value, random)
    return odd_value(random)


def mutate_bytes(data: bytes, random: Random) -> bytes:
    """Bits turned over, a piece taken out, doubled, put in, or the end cut off."""
    body = bytearray(data)
    at = random.randrange(len(body) + 1)
    match random.randrange(6):
        case 0:
            del body[at:]
        case 1:
            del body[at : at + random.randrange(1, 9)]
        case 2:
            body[at:at] = body[at : at + random.randrange(1, 40)]
        case 3:
            body[at:at] = random.randbytes(random.randrange(1, 12))
        case _:
            for _ in range(random.randrange(1, 4) if body else 0):
                body[random.randrange(len(body))] ^= 1 << random.randrange(8)
    return bytes(body)


def bad_body(message: msgspec.Struct, random: Random) -> bytes:
    """The body of a frame made from a good message; now and then it is good still."""
    body = msgspec.msgpack.encode(message)
    match random.randrange(10):
        case 0:
            return random.randbytes(random.choice((0, 1, 2, 8, 100, 1000)))
        case 1 | 2 | 3:
            return mutate_bytes(body, random)
    change = nudge_tree if random.randrange(2) else mutate_tree
    return msgspec.msgpack.encode(change(msgspec.msgpack.decode(body), random))
