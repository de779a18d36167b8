"""From a step's offers to its announcement no list of token ids is made: the cost does not grow with the tokens.

The same steps run with blocks of 16 and of 256 tokens. What differs is what the tokens cost: nothing, where a run
is stored whole; one slice of the offer's bytes, where a part of it is.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple

import pytest

from kvevents_service.core.commands import Command, Copy, Publish
from kvevents_service.core.metadata import BlockStoreMeta, StoreRun
from kvevents_service.core.scheduler import OffloadScheduler
from kvevents_service.core.tier import TierSpec
from kvevents_service.testing import Chain, make_chain
from kvevents_service.wire.control import GroupSpec, Offer, Step
from kvevents_service.wire.framing import decode_client, encode_message
from kvevents_service.wire.packing import INT32_BYTES

SMALL, LARGE = 16, 256
BLOCKS = 256
SLACK_BYTES, SLACK_OBJECTS = 2048, 16
"""What an interpreter may do beside. A list of the tokens of a single large block is more."""


class Spent(NamedTuple):
    """What steps cost until their announcements: bytes at the worst moment and after them, objects after them."""

    peak_bytes: int
    kept_bytes: int
    kept_objects: int


def group(kind: str, block_size: int) -> GroupSpec:
    return GroupSpec(0, kind, block_size, block_size if kind == "sliding_window" else None)


def open_tier(spec: GroupSpec, capacity: int = 4 * BLOCKS) -> OffloadScheduler:
    scheduler = OffloadScheduler(TierSpec("CPU", capacity, 32, (spec,), spec.block_size))
    scheduler.hello(1, 4 * BLOCKS)
    return scheduler


def prompt(block_size: int, blocks: int = BLOCKS) -> Chain:
    """A prompt of whole blocks; every token id is an object of its own once it is an int."""
    return make_chain(range(1000, 1000 + blocks * block_size), block_size)


def arrived(*chains: Chain) -> Step:
    """A step as the sidecar reads it from its socket."""
    step = decode_client(
        bytes(encode_message(Step(1, [chain.offer(range(len(chain.hashes))) for chain in chains])))[4:]
    )
    assert isinstance(step, Step)
    return step


def to_the_announcement(scheduler: OffloadScheduler, step: Step) -> list[Command]:
    """All that is decided: of the step, and of its copy, which ends at once."""
    decided: list[Command] = []
    for command in scheduler.step(1, step, 0.0):
        decided += [command, *(scheduler.complete(command.transfer) if isinstance(command, Copy) else [])]
    return decided


def runs_of(commands: list[Command]) -> list[StoreRun]:
    return [run for command in commands if isinstance(command, Copy) for run in command.transfer.runs]


def announced(commands: list[Command]) -> Iterator[BlockStoreMeta]:
    for command in commands:
        if isinstance(command, Publish):
            yield from (item for item in command.announcements if isinstance(item, BlockStoreMeta))


def spent(scheduler: OffloadScheduler, step: Step) -> Spent:
    """Measured over `to_the_announcement`; its commands are kept meanwhile."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        objects = sys.getallocatedblocks()
        commands = to_the_announcement(scheduler, step)
        objects = sys.getallocatedblocks() - objects
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert list(announced(commands)), "something was stored"
    return Spent(peak, kept, objects)


def cost(kind: str, block_size: int, known_blocks: int, capacity: int = 4 * BLOCKS) -> Spent:
    """Of offering a prompt whose first blocks are stored. Done twice: the first time warms the interpreter."""
    return [_cost(kind, block_size, known_blocks, capacity) for _ in range(2)][-1]


def _cost(kind: str, block_size: int, known_blocks: int, capacity: int) -> Spent:
    scheduler, chain = open_tier(group(kind, block_size), capacity), prompt(block_size)
    if known_blocks:
        to_the_announcement(scheduler, arrived(chain.part(0, known_blocks)))
    return spent(scheduler, arrived(chain))


def check(small: Spent, large: Spent, *, sliced_blocks: int, slices: int) -> None:
    """Large blocks cost more by the slices that are kept, and by one byte a token while its sign is looked at."""
    more_tokens = LARGE - SMALL
    kept = slices * sliced_blocks * more_tokens * INT32_BYTES
    assert abs(large.kept_objects - small.kept_objects) <= SLACK_OBJECTS
    assert abs(large.kept_bytes - small.kept_bytes - kept) <= SLACK_BYTES
    assert large.peak_bytes - small.peak_bytes <= max(kept, BLOCKS * more_tokens) + SLACK_BYTES


KINDS = pytest.mark.parametrize("kind", ["full_attention", "sliding_window"])


@KINDS
def test_a_run_that_is_stored_whole_costs_nothing_for_its_tokens(kind: str) -> None:
    small, large = (cost(kind, size, known_blocks=0) for size in (SMALL, LARGE))
    check(small, large, sliced_blocks=0, slices=0)


@KINDS
@pytest.mark.parametrize("known", [1, BLOCKS // 2, BLOCKS - 1])
def test_the_unknown_rest_of_a_run_costs_one_slice(kind: str, known: int) -> None:
    small, large = (cost(kind, size, known_blocks=known) for size in (SMALL, LARGE))
    check(small, large, sliced_blocks=BLOCKS - known, slices=1)


def test_a_run_that_finds_room_for_a_part_costs_one_slice() -> None:
    """The pool keeps the offer's own bytes, the announcement those that were stored."""
    room = BLOCKS // 2
    small, large = (cost("full_attention", size, 0, capacity=room) for size in (SMALL, LARGE))
    check(small, large, sliced_blocks=room, slices=1)


def test_many_blocks_cost_no_object_for_their_tokens() -> None:
    """Of each block its hash and its slot's number are kept; nothing else. The index has its tables before."""
    scheduler = open_tier(group("full_attention", LARGE), 8 * BLOCKS)
    to_the_announcement(scheduler, arrived(make_chain(range(4 * BLOCKS * LARGE), LARGE)))
    found = spent(scheduler, arrived(prompt(LARGE)))
    assert found.kept_objects <= 2 * BLOCKS + 200
    assert found.peak_bytes < BLOCKS * LARGE * INT32_BYTES


def calls(blocks: int) -> Counter[str]:
    """Functions called, Python's and C's, while a prompt of so many blocks is taken and its copy ends."""
    scheduler, step, seen = (
        open_tier(group("full_attention", SMALL)),
        arrived(prompt(SMALL, blocks)),
        Counter[str](),
    )

    def count(frame: FrameType, event: str, function: object) -> None:
        if event in ("call", "c_call"):
            seen[frame.f_code.co_name if event == "call" else getattr(function, "__name__", "")] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    to_the_announcement(scheduler, step)
    sys.setprofile(before)
    return seen


def test_nothing_is_called_for_each_block() -> None:
    """Lists that are thrown away one by one show in no count of bytes. Finding the known prefix takes log2(n)."""
    more = calls(2 * BLOCKS) - calls(BLOCKS)
    assert more.total() < BLOCKS // 8, more


@KINDS
def test_the_snapshot_is_the_offers_own_bytes(kind: str) -> None:
    step = arrived(prompt(SMALL))
    commands = to_the_announcement(open_tier(group(kind, SMALL)), step)
    metas = [*(run.meta for run in runs_of(commands)), *announced(commands)]
    assert len(metas) == 2
    for meta in metas:
        assert meta.token_ids is step.offers[0].token_ids
        assert meta.block_hashes is step.offers[0].block_hashes


def test_the_rest_of_a_run_keeps_exactly_its_tokens() -> None:
    scheduler, chain = open_tier(group("full_attention", SMALL)), prompt(SMALL)
    to_the_announcement(scheduler, arrived(chain.part(0, 100)))
    (meta,) = announced(to_the_announcement(scheduler, arrived(chain)))
    offer: Offer = chain.part(100).offer(range(BLOCKS - 100))
    assert (type(meta.token_ids), meta.token_ids) == (bytes, offer.token_ids)
