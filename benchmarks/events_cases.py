"""What the two sides of `events_cost` share: kinds of steps, what is offered in them, and costs per block."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.harness import BLOCK_TOKENS, Chain, Spread, make_chain
from kvevents_service.engine.offers import make_offer
from kvevents_service.wire.control import Offer

WARM_UP = 3
ROUND_BLOCKS = 8192


class Case(NamedTuple):
    """One kind of step: so many offers of so many blocks; `keyed` ones with LoRA and extra keys for each block."""

    name: str
    offers: int
    blocks: int
    evicting: bool = False
    keyed: bool = False

    @property
    def step_blocks(self) -> int:
        return self.offers * self.blocks

    @property
    def judged(self) -> bool:
        """Runs of many blocks, as the target was set for. What an offer costs by itself is the `decode` case."""
        return self.blocks > 1

    @property
    def steps(self) -> int:
        """Steps in a round of the sidecar's side."""
        return max(1, ROUND_BLOCKS // self.step_blocks)


class Costs(NamedTuple):
    """us per block of one case: what events added, round by round; what the step cost without; the noise.

    `least` is the cheapest round with events minus the cheapest without: what is left when neighbours are quiet.
    """

    added: Spread
    least: float
    without: float
    noise: float

    @classmethod
    def of(cls, rounds: Sequence[tuple[float, float, float]], blocks: int) -> Costs:
        """`rounds` are seconds without, with and without again, each for `blocks` blocks."""
        us = [[seconds / blocks * 1e6 for seconds in triple] for triple in rounds]
        added = [middle - (before + after) / 2 for before, middle, after in us]
        least = min(middle for _, middle, _ in us) - min(before for before, _, _ in us)
        noise = statistics.median(abs(after - before) for before, _, after in us)
        return cls(Spread.of(added), least, statistics.median(before for before, _, _ in us), noise)


class Requests:
    """The requests of a case. In a decode case the same ones grow by a block a step."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._number = 0
        self._parents: list[bytes | None] = [None] * case.offers

    def chains(self) -> list[Chain]:
        """What the next step has to offer, one chain a request."""
        self._number += 1
        first = self._number * self.case.offers
        return [make_chain(first + i, self.case.blocks) for i in range(self.case.offers)]

    def parents(self, chains: list[Chain]) -> list[bytes | None]:
        """The block before each chain."""
        if self.case.offers == 1:
            return self._parents
        before, self._parents = self._parents, [chain.block_hashes[-1] for chain in chains]
        return before


class Identity(NamedTuple):
    """What else names the blocks of a request: its adapter, and what the engine put into each block's hash."""

    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None

    @classmethod
    def of(cls, case: Case) -> Identity:
        if not case.keyed:
            return cls()
        return cls(1, "adapter-1", [("adapter-1", ("image-1", -16 * i)) for i in range(case.blocks)])


def described(chain: Chain, block_ids: list[int], parent: bytes | None, identity: Identity) -> Offer:
    """An offer with all that an event says."""
    blocks, keys = len(block_ids), identity.extra_keys
    return make_offer(
        chain.request_id,
        chain.block_hashes[:blocks],
        chain.token_ids[: blocks * BLOCK_TOKENS],
        block_ids,
        parent=parent,
        lora_id=identity.lora_id,
        lora_name=identity.lora_name,
        extra_keys=keys and keys[:blocks],
    )


def bare(chain: Chain, block_ids: list[int]) -> Offer:
    """An offer that only says what to copy."""
    return make_offer(chain.request_id, chain.block_hashes[: len(block_ids)], (), block_ids)


def block_ids(case: Case) -> list[list[int]]:
    """Engine blocks of each offer of a step."""
    return [list(range(i * case.blocks, (i + 1) * case.blocks)) for i in range(case.offers)]
