"""What is left of a batch when its users' words are taken out."""

import msgspec
import pytest
from wire_vectors import DECODED

from kvevents_service.wire.codec import decode_batch
from kvevents_service.wire.events import BlockStored
from kvevents_service.wire.redacted import redacted


@pytest.mark.parametrize("vector", DECODED, ids=lambda vector: vector.id)
def test_all_but_tokens_and_extra_keys_stays(vector) -> None:
    payload = redacted(vector.payload)
    assert payload is not None
    before, after = decode_batch(vector.payload), decode_batch(payload)
    assert after.skipped == before.skipped
    for was, now in zip(before.batch.events, after.batch.events, strict=True):
        if not isinstance(was, BlockStored):
            assert now == was
            continue
        assert isinstance(now, BlockStored)
        assert list(now.token_ids) == [0] * len(was.token_ids)
        hidden = {"token_ids": [], "extra_keys": None, "lookahead_token_ids": None}
        assert msgspec.structs.replace(now, **hidden) == msgspec.structs.replace(was, **hidden)


def test_extra_keys_are_told_apart_and_not_read() -> None:
    event = {"type": "BlockStored", "extra_keys": [["salt-of-a-user"], ["salt-of-a-user"], ["other", 7], None]}
    payload = redacted(msgspec.msgpack.encode([1.0, [event], 0]))
    assert payload is not None
    assert b"salt" not in payload
    one, same, other, nothing = msgspec.msgpack.decode(payload)[1][0]["extra_keys"]
    assert one == same != other
    assert nothing is None


def test_lookahead_tokens_and_pairs_go_too() -> None:
    events = [{"type": "BlockStored", "token_ids": [[7, 8], [8, 9]], "lookahead_token_ids": [[5, 6]]}]
    payload = redacted(msgspec.msgpack.encode([1.0, events, 0]))
    assert payload is not None
    event = msgspec.msgpack.decode(payload)[1][0]
    assert (event["token_ids"], event["lookahead_token_ids"]) == ([[0, 0], [0, 0]], [[0, 0]])


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", msgspec.msgpack.encode("text"), msgspec.msgpack.encode([1.0, [5]])]
)
def test_what_is_no_batch_is_left_out(payload: bytes) -> None:
    assert redacted(payload) is None
