"""The KV cache of a script's model: its groups, the hash unit, what a prefix hit needs. Both sides read it.

    {"groups": [[kind, block_size, window], ...], "hash_size", "dcp"}

`block_size` is that of one rank: under decode context parallelism an attention block spans `dcp` times as many
tokens, a mamba block does not. `window` is the window, or the size of a chunk, or null. A "scratch" group is
never stored. Imports nothing, because the vLLM side runs in another virtual environment.
"""

from __future__ import annotations

from math import lcm
from typing import Any, NamedTuple

PREFIX = ("full_attention", "mla_attention", "sink_full_attention")
WINDOW = ("sliding_window", "sliding_window_mla")
CHUNK, STATE, SCRATCH = "chunked_local_attention", "mamba", "scratch"


class Group(NamedTuple):
    """One KV cache group. `block_size` in tokens as stored."""

    index: int
    kind: str
    block_size: int
    window: int | None

    def needed(self, tokens: int, start: int) -> range:
        """Blocks that a prefix of `tokens` needs, those before `start` left out. It may end inside the last one."""
        window, first, stop = self.window or 1, 0, -(-tokens // self.block_size)
        if self.kind in WINDOW:
            first = tokens - window + 1
        elif self.kind == CHUNK:
            first = tokens // window * window
        elif self.kind == STATE:
            first = (stop - 1) * self.block_size
        return range(max(first, start, 0) // self.block_size, stop)


def units_inside(group: Group, hash_size: int) -> int:
    """Hash units of a block, in the groups where a prefix may end inside one; else 1."""
    return group.block_size // hash_size if group.kind in (*PREFIX, STATE) else 1


class Model(NamedTuple):
    """Every group of a model, scratch ones too. `hash_size` in tokens."""

    groups: tuple[Group, ...]
    hash_size: int
    dcp: int

    @property
    def stored(self) -> list[Group]:
        """The groups that take part in prefix caching."""
        return [group for group in self.groups if group.kind != SCRATCH]

    @property
    def alignment(self) -> int:
        """vLLM's scheduler block size: a hit is a multiple of it, unless hits are fine-grained."""
        return lcm(*(group.block_size for group in self.stored))

    @property
    def sizes(self) -> list[int]:
        """Every token range that has extra keys of its own."""
        return sorted({self.hash_size, *(group.block_size for group in self.stored)})

    @property
    def fine_grained(self) -> bool:
        """vLLM's partial hash hits: a mamba state wider than the hash unit, no group that needs whole blocks."""
        coarse = any(
            group.kind not in (*PREFIX, STATE) and group.block_size != self.hash_size for group in self.stored
        )
        slack = 0 if self.dcp > 1 else 1
        states = [group.block_size for group in self.stored if group.kind == STATE]
        return any(size >= self.hash_size + slack for size in states) and not coarse


def model_of(plain: dict[str, Any]) -> Model:
    dcp = plain.get("dcp", 1)
    groups = [
        Group(index, kind, size * (dcp if kind not in (STATE, SCRATCH) else 1), window)
        for index, (kind, size, window) in enumerate(plain["groups"])
    ]
    return Model(tuple(groups), plain["hash_size"], dcp)
