"""The index as a router feeds it: a subscriber's items, stale sources, warnings."""

import logging

import pytest

from kvevents_service.core.holders import Held
from kvevents_service.errors import WireError
from kvevents_service.prefix_index import PrefixIndex
from kvevents_service.subscriber import Back, Batch, Gap, Item, Origin, Refused, Restart, Resync, Stale, Undecodable
from kvevents_service.wire.events import BlockStored, EventBatch

A, B = Origin("pod-a", b"kv", 0), Origin("pod-b", b"kv", 0)
HELD = Held(2, {"CPU": 2})


def batch(source: Origin, block_size: int = 2, tokens: int = 2) -> Batch:
    event = BlockStored([1], None, [1] * tokens, block_size, None, "CPU", None)
    return Batch(b"kv", 0, EventBatch(1.0, [event], 0), (), False, source)


def fed(*items: Item, block_size: int | None = None) -> PrefixIndex:
    index = PrefixIndex(block_size)
    for item in items:
        index.take(item)
    return index


def test_it_answers_by_source() -> None:
    index = fed(batch(A), batch(B))
    assert index.match([1, 1]) == index.match_hashes([1]) == {A: HELD, B: HELD}


@pytest.mark.parametrize(
    "loss", [Gap(1, 2, A), Restart(2, 1, A), Resync(1, 2, A), Undecodable(b"kv", 1, WireError("ts", "float"), A)]
)
def test_after_a_loss_that_source_is_forgotten(loss: Item) -> None:
    assert fed(batch(A), batch(B), loss).match([1, 1]) == {B: HELD}


def test_a_refusal_forgets_nothing() -> None:
    index = fed(batch(A), Refused(A.label, "keys"))
    assert len(index) == len(fed(batch(A)))
    assert len(index)


def test_a_stale_source_is_left_out_until_it_is_back() -> None:
    index = fed(batch(A), batch(B), Stale("pod-a", 9.0))
    assert index.match([1, 1]) == index.match_hashes([1]) == {B: HELD}
    index.take(Back("pod-a"))
    assert index.match([1, 1]) == {A: HELD, B: HELD}


def test_when_all_are_stale_none_is_left_out() -> None:
    index = fed(batch(A), batch(B), Stale("pod-a", 9.0), Stale("pod-b", 9.0))
    assert index.match([1, 1]) == {A: HELD, B: HELD}


@pytest.mark.parametrize(
    ("bad", "text"),
    [(batch(A, block_size=4, tokens=4), "block size than the 2 tokens"), (batch(A, tokens=3), "line up")],
)
def test_what_is_left_out_is_said_now_and_then(bad: Batch, text: str, caplog: pytest.LogCaptureFixture) -> None:
    index = PrefixIndex(block_size=2)
    with caplog.at_level(logging.WARNING):
        for _ in range(150):
            index.take(bad)
    said = [record.getMessage().rpartition("(")[2] for record in caplog.records]
    assert said == ["1 so far)", "10 so far)", "100 so far)"]
    assert text in caplog.text
    assert "pod-a" in caplog.text


def test_the_state_is_in_the_repr() -> None:
    assert repr(fed(batch(A))) == "<PrefixIndex 1 blocks of 1 sources, 0 orphans>"
