"""Payloads lie side by side in larger memory, each as it was put there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents_service.wire import slabs
from kvevents_service.wire.slabs import Slabs

pieces_s = st.lists(st.binary(max_size=40) | st.binary(max_size=40).map(memoryview), max_size=5)


@pytest.mark.parametrize("quick", [True, False])
@given(st.lists(pieces_s, max_size=12))
def test_every_payload_stays_what_was_joined(quick: bool, payloads: list[list[bytes | memoryview]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slabs, "FIRST_BYTES", 8)
        patch.setattr(slabs, "MOST_BYTES", 64)
        if not quick:
            patch.setattr(slabs, "numpy", None)
        made = Slabs()
        joined = [made.joined(pieces) for pieces in payloads]
    assert [*map(bytes, joined)] == [b"".join(pieces) for pieces in payloads]
    assert all(payload.readonly for payload in joined)


def test_a_small_state_takes_little_memory_and_a_large_one_few_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    fresh = slabs._fresh
    monkeypatch.setattr(slabs, "_fresh", lambda size: taken.append(size) or fresh(size))
    made, part = Slabs(), bytes(200 * 1024)
    for _ in range(500):
        made.joined([part])
    assert taken[0] == slabs.FIRST_BYTES
    assert max(taken) == slabs.MOST_BYTES
    assert len(taken) < 15
    made.joined([bytes(slabs.MOST_BYTES + 1)])
    assert taken[-1] == slabs.MOST_BYTES + 1
