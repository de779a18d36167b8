"""Batches made one hold the events of all, and decode as if they had been written so."""

import pytest

from kvevents_service.wire.codec import decode_batch, encode_own
from kvevents_service.wire.events import BlockRemoved, EventBatch
from kvevents_service.wire.splice import spliced

ID = b"0123456789abcdef"


@pytest.mark.parametrize("counts", [[0], [1], [15, 1], [16], [0, 65_535, 3], [65_536, 0, 1]])
@pytest.mark.parametrize(("rank", "publisher_id"), [(0, None), (3, ID), (70_000, None)])
def test_the_events_of_all_in_order(counts: list[int], rank: int, publisher_id: bytes | None) -> None:
    names = iter(range(100_000))
    events = [[BlockRemoved([next(names)], "CPU") for _ in range(count)] for count in counts]
    empty = encode_own(EventBatch(1.5, [], rank, publisher_id))
    payload = spliced(empty, [encode_own(EventBatch(9.5, some, rank, publisher_id)) for some in events])
    decoded = decode_batch(payload)
    assert decoded.skipped == ()
    assert decoded.batch == EventBatch(1.5, [event for some in events for event in some], rank, publisher_id)
