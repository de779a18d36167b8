"""A recorded source, played again: the same state in the end, in its own time or faster."""

import errno
import io
import json
import stat
import time
from pathlib import Path

import pytest
from core.engine_model import key, stored
from test_relay import AB, ABC, AC, A, engine, relayed, source_of

from kvevents_service.errors import ConfigError
from kvevents_service.service.recorder import Recorder
from kvevents_service.source_config import SourceConfig
from kvevents_service.wire.events import AllBlocksCleared, BlockRemoved
from kvevents_service.wire.frames import parse_replay_reply


async def record(path: Path, **more: object) -> None:
    """A life with a join to a history, a loss that is filled, a restart, and a message that is no batch."""
    async with engine() as peer:
        peer.send(1, stored(AB, 2))
        async with relayed(source_of(peer, record=str(path), **more)) as relay:
            await relay.shows(A, AB)
            await peer.subscribed()
            peer.model.publish(stored(ABC))
            peer.send(1, stored(AC))
            await relay.shows(A, AB, ABC, AC)
            peer.xpub.send_multipart([b"kv", b"?", b"secret"])
            peer.model = type(peer.model)(snapshots=False)
            peer.send(1, stored(ABC, 3))
            await relay.shows(A, AB, ABC)
            peer.send(1, BlockRemoved([key(ABC)], "GPU"))
            await relay.shows(A, AB)


@pytest.mark.parametrize("redact", [False, True])
async def test_a_recording_ends_in_the_same_state(tmp_path: Path, redact: bool) -> None:
    path = tmp_path / "stream.jsonl"
    await record(path, redact=redact)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (b"secret".hex() in path.read_text()) is not redact
    async with relayed(SourceConfig(input=str(path), speed=10.0)) as relay:
        await relay.until(lambda: relay.service.ranks[0].relay.relayed[0].feed.ended)  # type: ignore[union-attr]
        await relay.shows(A, AB)
        assert relay.view.counts["lost"] == 0
        assert relay.view.counts["doubted"] == 1


async def test_a_recording_is_played_at_its_speed(tmp_path: Path) -> None:
    path = tmp_path / "stream.jsonl"
    now = [0.0]
    recorder = Recorder(str(path), lambda: now[0], replay=False)
    async with engine() as peer:
        for at, event in ((0.0, stored(A)), (20.0, AllBlocksCleared())):
            now[0] = at
            frame = peer.model.publish(event)
            recorder.message([frame.topic, frame.seq.to_bytes(8, "big"), frame.payload], reply=False)
    recorder.close()
    started = time.monotonic()
    async with relayed(SourceConfig(input=str(path), speed=20.0)) as relay:
        await relay.shows(A)
        await relay.shows()
        assert time.monotonic() - started >= 0.9


async def test_a_recording_of_vectors_is_read(tmp_path: Path) -> None:
    vectors = Path(__file__).parents[2] / "proto" / "vectors" / "vllm-0.33-gpu-int-hash.jsonl"
    async with relayed(SourceConfig(input=str(vectors))) as relay:
        await relay.until(lambda: relay.view.counts["stored"] > 0)


async def test_lines_that_are_no_recording_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    lines = ["", "no json", json.dumps({"frames": ["zz"]}), json.dumps({"frames": ["00"]}), json.dumps({"at": 1.0})]
    path.write_text("\n".join(lines))
    async with relayed(SourceConfig(input=str(path))) as relay:
        await relay.until(lambda: relay.view.counts["undecodable"] == 3)


async def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "there"
    path.write_text("x")
    with pytest.raises(ConfigError, match="record: expected a new file"):
        async with relayed(SourceConfig("tcp://127.0.0.1:1", record=str(path))):
            pass
    with pytest.raises(ConfigError, match="input: expected a file that can be read"):
        async with relayed(SourceConfig(input=str(tmp_path / "none"))):
            pass


@pytest.mark.parametrize("frames", [[bytes(8), b"x"], [b"", bytes(8), b"x"], [b"kv", bytes(8), b"x"]])
def test_replies_in_older_framings_are_told_from_live_messages(tmp_path: Path, frames: list[bytes]) -> None:
    path = tmp_path / "f"
    recorder = Recorder(str(path), time.time, replay=True)
    recorder.message(frames, reply=True)
    recorder.close()
    kept = [bytes.fromhex(one) for one in json.loads(path.read_text().splitlines()[-1])["frames"]]
    assert (len(kept), kept[0]) == (4, b"")
    assert parse_replay_reply(kept) == parse_replay_reply(frames)


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "full")


def test_a_disk_that_fails_stops_only_the_recording(tmp_path: Path) -> None:
    recorder = Recorder(str(tmp_path / "f"), time.time, replay=True)
    recorder._file, opened = FullDisk(), recorder._file
    for _ in range(2):
        recorder.message([b"kv", bytes(8), b"x"], reply=False)
    assert (recorder.written, recorder.failed) == (1, 1)
    assert opened is not None
    opened.close()
