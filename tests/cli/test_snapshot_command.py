"""`kvevents snapshot` against endpoints that answer, refuse, lie and say nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq
from click.testing import CliRunner, Result

from kvevents_service.cli import kvevents
from kvevents_service.wire.codec import encode_batch
from kvevents_service.wire.events import AllBlocksCleared, BlockStored, EventBatch
from kvevents_service.wire.frames import REPLAY_END, live_frames, snapshot_reply

ID = bytes(range(16))
STORED = BlockStored([11, 12], None, [1, 2, 3, 4, 5, 6, 7, 8], 4, None, "CPU", None)
STATE = [encode_batch(EventBatch(1.5, [AllBlocksCleared(), STORED], 0, ID))]


@contextmanager
def answering(frames: list[bytes]) -> Iterator[str]:
    """An endpoint that answers one request with these frames."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 1000)
        port = router.bind_to_random_port("tcp://127.0.0.1")

        def answer() -> None:
            identity, _, request = router.recv_multipart()
            assert request == b"snapshot"
            router.send_multipart([identity, b"", *frames])

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"tcp://127.0.0.1:{port}"
        thread.join()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(kvevents, ["snapshot", *arguments], standalone_mode=False)


def test_a_summary_of_what_is_resident() -> None:
    with answering(snapshot_reply(7, ID, STATE)) as endpoint:
        result = run(endpoint)
    assert result.return_value == 0
    assert result.stdout.splitlines() == [
        f"after #7  publisher {ID.hex()}  2 blocks",
        "CPU     g0     2 blocks  8 tokens",
    ]


def test_json_is_one_event_a_line_without_prompts() -> None:
    with answering(snapshot_reply(7, ID, STATE)) as endpoint:
        result = run(endpoint, "--json")
    first, second = map(json.loads, result.stdout.splitlines())
    assert (first["type"], second["type"], second["seq"]) == ("AllBlocksCleared", "BlockStored", 7)
    assert "token_ids" not in second


@pytest.mark.parametrize(
    ("frames", "code", "said"),
    [
        (snapshot_reply(-1, ID, []), 0, ""),
        (snapshot_reply(-2, ID, []), 1, "unavailable"),
        ([b"short", ID], 1, "seq: expected 8 bytes"),
        ([bytes(8), b"short"], 1, "publisher_id: expected 16 bytes"),
        ([bytes(8)], 1, "frames: expected"),
        ([bytes(8), ID, b"\xc1"], 1, "batch: expected"),
        (REPLAY_END[1:], 1, "is a replay endpoint"),
        (live_frames(b"", 7, b"\xc1"), 1, "is a replay endpoint"),
        (live_frames(b"8 bytes.", 7, b"\xc1"), 1, "is a replay endpoint"),
    ],
)
def test_what_is_no_snapshot_is_named(frames: list[bytes], code: int, said: str) -> None:
    with answering(frames) as endpoint:
        result = run(endpoint)
    assert (result.return_value, said in result.stderr) == (code, True)


def test_silence_ends_and_is_said() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        result = run(f"tcp://127.0.0.1:{port}", "--wait", "0.1")
    assert (result.return_value, "no answer" in result.stderr) == (1, True)


def test_no_endpoint_is_bad_usage() -> None:
    assert run("nowhere").return_value == 2
