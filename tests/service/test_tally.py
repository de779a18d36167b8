"""The tally counts what each dialect's readers are told: it is compared with what they are told."""

from collections import Counter

import pytest

from kvevents_service.cli.render import short_hash
from kvevents_service.core.announce import encode
from kvevents_service.core.journal import PendingBatch
from kvevents_service.core.metadata import Announcement, BlockStoreMeta, Cleared, RemovedRun, snapshot
from kvevents_service.service.tally import LATEST, Tally
from kvevents_service.testing import make_chain
from kvevents_service.wire.codec import decode_batch
from kvevents_service.wire.control import GroupSpec
from kvevents_service.wire.dialects import DIALECTS
from kvevents_service.wire.events import AllBlocksCleared

MAIN = GroupSpec(0, "full_attention", 4, main=True)
WINDOW = GroupSpec(1, "sliding_window", 4, 8)
CHAIN = make_chain(range(12), 4)


def stored(group: GroupSpec, medium: str) -> BlockStoreMeta:
    return snapshot(CHAIN.offer(range(3), group=group.index), group, medium, 32)


SAID: list[Announcement] = [
    stored(MAIN, "CPU"),
    stored(MAIN, "GPU"),
    stored(WINDOW, "CPU"),
    RemovedRun(MAIN, "CPU", CHAIN.hashes[:2]),
    RemovedRun(MAIN, "GPU", CHAIN.hashes[:1], inner=True),
    RemovedRun(MAIN, "STORAGE", CHAIN.hashes),
    Cleared(),
    stored(MAIN, "MINE"),
]


def tallied() -> Tally:
    tally = Tally()
    tally.add(PendingBatch(7, 1.5, tuple(SAID)))
    return tally


@pytest.mark.parametrize("name", DIALECTS)
def test_it_counts_what_each_dialect_says(name: str) -> None:
    payload = encode(DIALECTS[name], SAID, 0.0, 0)
    told = Counter(
        (type(event).__name__, "" if isinstance(event, AllBlocksCleared) else event.medium)
        for event in decode_batch(payload).batch.events
    )
    assert {(kind, medium): events for kind, medium, events in tallied().said_in(DIALECTS[name])} == told


def test_the_latest_are_as_tail_shows_them() -> None:
    latest = tallied().latest()
    assert [told.type for told in latest] == [
        *["BlockStored"] * 3, *["BlockRemoved"] * 3, "AllBlocksCleared", "BlockStored",
    ]  # fmt: skip
    first = latest[0]
    assert (first.seq, first.ts, first.blocks) == (7, 1.5, 3)
    assert (first.first, first.last) == (short_hash(CHAIN.hashes[0]), short_hash(CHAIN.hashes[2]))


def test_the_latest_are_bounded() -> None:
    tally = Tally()
    for seq in range(100):
        tally.add(PendingBatch(seq, 0.0, tuple(SAID)))
    assert len(tally.latest()) == LATEST
    assert tally.latest()[-1].seq == 99
    assert tally.events.total() == 800
