"""A true stream with everything in it: groups, tiers, adapters, salts, images, inner hashes, removals, clears.

`Source` keeps what is resident while it makes announcements, so that any reader's index can be compared with it.
"""

from __future__ import annotations

from hashlib import sha256
from random import Random
from typing import Any, NamedTuple

from msgspec.structs import replace

from doubles.reading import leading
from kvevents_service.core.metadata import Announcement, BlockStoreMeta, Cleared, RemovedRun
from kvevents_service.wire.control import GroupSpec
from kvevents_service.wire.packing import pack_int32

BLOCK, UNIT = 4, 2
HASH_BYTES = 32
WINDOW = GroupSpec(0, "sliding_window", BLOCK, 8)
MAIN = GroupSpec(1, "full_attention", BLOCK)
STATE = GroupSpec(2, "mamba", BLOCK)
GROUPS = (WINDOW, MAIN, STATE)
MEDIA = ("GPU", "CPU", "STORAGE", "EXTERNAL", "TAPE")
IMAGE, OTHER_IMAGE = "c0ffee00" * 8, "decade00" * 8


class Block(NamedTuple):
    """One block of a prompt."""

    name: bytes
    tokens: tuple[int, ...]
    extra_keys: tuple[Any, ...] | None


class Prompt(NamedTuple):
    """The blocks of a prompt, computed with an adapter or with the base model."""

    blocks: tuple[Block, ...]
    lora_id: int | None = None
    lora_name: str | None = None

    @property
    def tokens(self) -> list[int]:
        return [token for block in self.blocks for token in block.tokens]


def prompt(tokens: list[int], *, lora: str | None = None, keys: dict[int, tuple[Any, ...]] | None = None) -> Prompt:
    """The prompt of these tokens; `keys` are extra keys of single blocks."""
    blocks: list[Block] = []
    for place in range(len(tokens) // BLOCK):
        own = tuple(tokens[place * BLOCK : (place + 1) * BLOCK])
        extra = ((lora,) if lora else ()) + (keys or {}).get(place, ())
        before = blocks[-1].name if blocks else b""
        name = sha256(before + pack_int32(own) + repr(extra).encode()).digest()
        blocks.append(Block(name, own, extra or None))
    return Prompt(tuple(blocks), 7 if lora else None, lora)


TEXT = list(range(100, 100 + 8 * BLOCK))
FORK = TEXT[: 3 * BLOCK] + list(range(500, 500 + 4 * BLOCK))
PROMPTS = (
    prompt(TEXT),
    prompt(FORK),
    prompt(list(range(900, 900 + 3 * BLOCK))),
    prompt(TEXT, lora="ada"),
    prompt(FORK, lora="bob"),
    prompt(TEXT, keys={0: ("salt-x",)}),
    prompt(TEXT, keys={1: ((IMAGE, 2),)}),
    prompt(TEXT, keys={1: ((OTHER_IMAGE, 2),)}),
    prompt(TEXT, keys={2: ({"odd": [1, None]}, (IMAGE, 1, 2), b"\x00\xff", None)}),
)


def inner_name(name: bytes) -> bytes:
    """The hash of the unit inside a block of this hash."""
    return sha256(b"inner" + name).digest()


class Where(NamedTuple):
    """A tier and a group."""

    medium: str
    group: GroupSpec


class Source:
    """Random announcements that a true publisher could make, and what is resident after them."""

    def __init__(self, seed: int, prompts: tuple[Prompt, ...] = PROMPTS) -> None:
        self.random = Random(seed)
        self.prompts = prompts
        self.resident: dict[Where, dict[bytes, bytes | None]] = {
            Where(medium, group): {} for medium in MEDIA for group in GROUPS
        }
        self.inner: dict[Where, set[bytes]] = {where: set() for where in self.resident}

    def batch(self) -> tuple[Announcement, ...]:
        """The next batch: none to three announcements."""
        steps = (self.store, self.store, self.store, self.remove, self.remove, self.clear)
        chosen = self.random.choices(steps, (6, 6, 6, 3, 3, 1), k=self.random.randrange(4))
        return tuple(item for step in chosen for item in step())

    def batches(self, count: int) -> list[tuple[Announcement, ...]]:
        return [self.batch() for _ in range(count)]

    def store(self) -> list[Announcement]:
        """A run of a prompt that is not there yet: behind its resident prefix, or anywhere in the other groups."""
        where = Where(self.random.choice(MEDIA), self.random.choice((MAIN, MAIN, *GROUPS)))
        chosen, there = self.random.choice(self.prompts), self.resident[where]
        start = 0
        if where.group is not MAIN:
            start = self.random.randrange(len(chosen.blocks))
        while start < len(chosen.blocks) and chosen.blocks[start].name in there:
            start += 1
        stop = start
        limit = min(len(chosen.blocks), start + self.random.randint(1, 5))
        while stop < limit and chosen.blocks[stop].name not in there:
            stop += 1
        if stop == start:
            return []
        run = self._stored(where, chosen, start, stop)
        return [run, *self._inner_of(where, run)]

    def _inner_of(self, where: Where, run: BlockStoreMeta) -> list[Announcement]:
        """Half the time, the name of the prefix that ends inside the run's last block."""
        if where.group is not MAIN or self.random.random() < 0.5:
            return []
        last = run.part(run.blocks - 1, run.blocks)
        name = inner_name(last.block_hashes)
        self.inner[where].add(name)
        unit = last.token_ids[: UNIT * 4]
        return [replace(last, block_hashes=name, token_ids=unit, extra_keys=None, inner=True)]

    def _stored(self, where: Where, chosen: Prompt, start: int, stop: int) -> BlockStoreMeta:
        blocks = chosen.blocks[start:stop]
        parents = [None, *(block.name for block in chosen.blocks)][start:stop]
        self.resident[where].update(zip((block.name for block in blocks), parents, strict=True))
        keys = [block.extra_keys for block in blocks]
        return BlockStoreMeta(
            where.group,
            where.medium,
            HASH_BYTES,
            b"".join(block.name for block in blocks),
            pack_int32([token for block in blocks for token in block.tokens]),
            parents[0],
            chosen.lora_id,
            chosen.lora_name,
            keys if any(keys) else None,
        )

    def remove(self) -> list[Announcement]:
        """One to four blocks of a tier, children before their parents."""
        where = self.random.choice([place for place, there in self.resident.items() if there] or [None])
        if where is None:
            return []
        there, gone = self.resident[where], []
        for _ in range(min(len(there), self.random.randint(1, 4))):
            parents = set(there.values()) if where.group is MAIN else set()
            leaf = self.random.choice([name for name in there if name not in parents])
            del there[leaf]
            gone.append(leaf)
        inner = tuple(name for name in map(inner_name, gone) if name in self.inner[where])
        self.inner[where].difference_update(inner)
        runs: list[Announcement] = [RemovedRun(where.group, where.medium, inner, True)] if inner else []
        return [*runs, RemovedRun(where.group, where.medium, tuple(gone))]

    def clear(self) -> list[Announcement]:
        for there in (*self.resident.values(), *self.inner.values()):
            there.clear()
        return [Cleared()]

    def names(self, medium: str, group: GroupSpec = MAIN, *, inner: bool = False) -> set[bytes]:
        """Digests of what is resident on a tier, those inside blocks too if asked for."""
        where = Where(medium, group)
        return {*self.resident[where], *(self.inner[where] if inner else ())}

    def prefix(self, medium: str, chosen: Prompt) -> int:
        """Leading blocks of a prompt that are resident on a tier, in the main group."""
        there = self.names(medium)
        return leading(block.name in there for block in chosen.blocks)
