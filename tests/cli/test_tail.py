"""`kvevents tail` as people run it: a process, its two streams and its exit status."""

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from kvevents_service.wire.codec import encode_batch
from kvevents_service.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch
from kvevents_service.wire.frames import live_frames

KVEVENTS = str(Path(sys.executable).with_name("kvevents"))
VECTORS = Path(__file__).parents[2] / "proto" / "vectors"
VALID = sorted(path for path in VECTORS.glob("*.jsonl") if path.stem != "invalid")
DEADLINE_S = 60
HOSTILE = "x\x1b[2J"


def run(*args: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [KVEVENTS, "tail", *args],
        input=stdin, capture_output=True, text=True, timeout=DEADLINE_S, env=os.environ | env,
    )  # fmt: skip


def objects(output: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in output.splitlines()]


def recorded(*events: Event, seq: int = 0, ts: float = 1.0) -> str:
    frames = live_frames(b"kv", seq, encode_batch(EventBatch(ts, list(events), 0)))
    return json.dumps({"frames": [frame.hex() for frame in frames]}) + "\n"


def stored(medium: str | None = "GPU", lora_name: str | None = None) -> BlockStored:
    return BlockStored([1 << 60], None, [1, 2], 2, None, medium, lora_name)


class TestRecording:
    def test_each_fault_is_named(self) -> None:
        path = VECTORS / "invalid.jsonl"
        result = run("--input", str(path))
        notes = [json.loads(line)["note"] for line in path.read_text().splitlines()[1:]]
        assert (result.returncode, result.stdout) == (1, "")
        lines = result.stderr.splitlines()
        assert len(notes) == len(lines) == 13
        for number, (note, line) in enumerate(zip(notes, lines, strict=True), 2):
            assert line.startswith(f"{path}:{number}: {note}: ")
            assert ": expected " in line

    def test_each_fault_is_an_object(self) -> None:
        result = run("--json", "--input", str(VECTORS / "invalid.jsonl"))
        assert [item["type"] for item in objects(result.stdout)] == ["Invalid"] * 13
        assert objects(result.stdout)[1] == {
            **{"type": "Invalid", "line": 3, "note": "seq of 4 bytes"},
            **{"field": "seq", "expected": "8 bytes"},
        }

    @pytest.mark.parametrize("path", VALID, ids=lambda path: path.stem)
    def test_the_others_decode_fully(self, path: Path) -> None:
        human, plain = run("--input", str(path)), run("--json", "--input", str(path))
        assert (human.returncode, human.stderr, plain.returncode, plain.stderr) == (0, "", 0, "")
        shown = [item["type"] for item in objects(plain.stdout)]
        assert len(human.stdout.splitlines()) == len(shown) == in_the_vectors(path)
        assert shown.count("Skipped") == path.read_text().count('"BlockPinned"')
        assert shown.count("ReplayEnd") == (path.stem == "vllm-0.33-replay")

    def test_stdin(self) -> None:
        result = run("--json", "--input", "-", stdin=recorded(AllBlocksCleared()) + "not json\n")
        assert [item["type"] for item in objects(result.stdout)] == ["AllBlocksCleared", "Invalid"]
        assert result.stderr == "<stdin>:2: line: expected a JSON object with `frames`, a list of strings\n"

    def test_invalid_lines_before_the_count_is_reached(self) -> None:
        assert run("--input", "-", "--count", "1", stdin="x\n" + recorded(AllBlocksCleared())).returncode == 1

    def test_a_recording_that_is_not_text(self, tmp_path: Path) -> None:
        path = tmp_path / "binary"
        path.write_bytes(b"\xff\xfe\x00{\n")
        assert run("--input", str(path)).returncode == 1

    @pytest.mark.parametrize(
        ("options", "types"),
        [
            (["--type", "stored"], ["stored", "stored"]),
            (["--type", "removed", "--type", "cleared"], ["removed", "cleared"]),
            (["--medium", "cpu_pinned"], ["stored", "removed", "cleared"]),
            (["--medium", "gpu", "--type", "stored"], ["stored"]),
            (["--count", "2"], ["stored", "stored"]),
            (["--count", "1", "--type", "removed"], ["removed"]),
            (["--topic", "kv"], ["stored", "stored", "removed", "cleared"]),
            (["--topic", "k"], []),
        ],
        ids=" ".join,
    )
    def test_filters(self, options: list[str], types: list[str]) -> None:
        events = [stored("CPU"), stored(None), BlockRemoved([1], "CPU_TIER1"), AllBlocksCleared()]
        result = run("--input", "-", *options, stdin=recorded(*events))
        assert result.returncode == 0
        assert [line.split()[2] for line in result.stdout.splitlines()] == types

    @pytest.mark.parametrize("unbuffered", ["", "1"])
    def test_a_closed_pipe_is_silence(self, tmp_path: Path, unbuffered: str) -> None:
        path = tmp_path / "longer-than-a-pipe-holds.jsonl"
        path.write_text(recorded(*[stored()] * 100) * 100)
        shell = ["bash", "-c", f"{KVEVENTS} tail --input {path} | head -1; echo ${{PIPESTATUS[0]}}"]
        env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        result = subprocess.run(shell, capture_output=True, text=True, timeout=DEADLINE_S, env=env)
        first, status = result.stdout.splitlines()
        assert "stored" in first
        assert (status, result.stderr) == ("0", "")

    @pytest.mark.parametrize("as_json", [[], ["--json"]])
    def test_control_characters_are_escaped(self, as_json: list[str]) -> None:
        result = run("--input", "-", *as_json, stdin=recorded(stored(lora_name=HOSTILE)))
        assert "[2J" in result.stdout
        assert result.stdout.rstrip("\n").isprintable()

    def test_tokens_are_hidden_unless_asked_for(self) -> None:
        assert "tokens=" not in run("--input", "-", stdin=recorded(stored())).stdout
        assert "tokens=1,2" in run("--input", "-", "--tokens", stdin=recorded(stored())).stdout

    @pytest.mark.parametrize("ts", [float("nan"), float("inf"), 1e300])
    def test_a_time_that_is_none(self, ts: float) -> None:
        assert run("--input", "-", stdin=recorded(stored(), ts=ts)).stdout.startswith("--:--:--")
        assert objects(run("--input", "-", "--json", stdin=recorded(stored(), ts=ts)).stdout)


def in_the_vectors(path: Path) -> int:
    """How many events, and replay ends, the vectors say a file holds."""
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    payloads = [bytes.fromhex(line["frames"][-1]) for line in lines]
    return sum(len(in_batch(msgspec.msgpack.decode(payload))) if payload else 1 for payload in payloads)


def in_batch(batch: object) -> list[object]:
    return batch["events"] if isinstance(batch, dict) else batch[1]


class TestColour:
    @pytest.mark.parametrize(
        ("options", "env", "coloured"),
        [
            ([], {}, True),
            ([], {"NO_COLOR": "1"}, False),
            ([], {"TERM": "dumb"}, False),
            (["--color", "never"], {}, False),
            (["--color", "always"], {"NO_COLOR": "1"}, True),
        ],
    )
    def test_on_a_terminal(self, options: list[str], env: dict[str, str], coloured: bool) -> None:
        terminal, stdout = pty.openpty()
        command = [KVEVENTS, "tail", "--input", str(VECTORS / "layouts.jsonl"), "--count", "1", *options]
        known = {name: text for name, text in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm"}
        subprocess.run(command, stdout=stdout, env=known | env, timeout=DEADLINE_S, check=True)
        shown = os.read(terminal, 4096)
        os.close(terminal)
        os.close(stdout)
        assert (b"\x1b[32mstored" in shown) == coloured

    def test_in_a_pipe(self) -> None:
        assert "\x1b" not in run("--input", "-", stdin=recorded(stored())).stdout


class Stream:
    """A publisher whose subscribers are known, on one machine's loopback."""

    def __init__(self, socket: zmq.Socket, endpoint: str = "tcp://127.0.0.1:0") -> None:
        self.socket, self.context = socket, socket.context
        self.socket.setsockopt(zmq.RCVTIMEO, DEADLINE_S * 1000)
        self.socket.bind(endpoint)
        self.endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def tail(self, *options: str) -> subprocess.Popen[str]:
        """A tail that has subscribed, and said so."""
        command = [KVEVENTS, "tail", self.endpoint, *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.socket.recv()
        assert process.stderr.readline() == f"following {self.endpoint}\n"
        return process

    def send(self, seq: int, *events: Event, topic: bytes = b"kv") -> None:
        self.socket.send_multipart(live_frames(topic, seq, encode_batch(EventBatch(1.0, list(events), 0))))


@pytest.fixture
def stream() -> Iterator[Stream]:
    context = zmq.Context()
    stream = Stream(context.socket(zmq.XPUB))
    yield stream
    stream.socket.close()
    context.destroy(linger=0)


@pytest.fixture
def other() -> Iterator[Stream]:
    context = zmq.Context()
    stream = Stream(context.socket(zmq.XPUB))
    yield stream
    stream.socket.close()
    context.destroy(linger=0)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=DEADLINE_S)
    return process.returncode, stdout, stderr


def both(first: Stream, second: Stream, *options: str) -> subprocess.Popen[str]:
    """A tail that has subscribed to the two."""
    command = [KVEVENTS, "tail", first.endpoint, second.endpoint, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for one in (first, second):
        one.socket.recv()
    return process


class TestStream:
    def test_each_event_is_a_line_at_once(self, stream: Stream) -> None:
        process = stream.tail("--json", "--count", "2")
        stream.send(0, stored())
        assert json.loads(process.stdout.readline())["type"] == "BlockStored"
        stream.send(1, AllBlocksCleared(), AllBlocksCleared())
        status, rest, errors = ended(process)
        assert (status, [item["type"] for item in objects(rest)], errors) == (0, ["AllBlocksCleared"], "")

    def test_losses_are_in_the_stream(self, stream: Stream) -> None:
        process = stream.tail("--count", "3")
        for seq in (0, 3, 1):
            stream.send(seq, stored())
        stream.socket.send_multipart([b"kv", b"\0" * 7, b"\x90"])
        stream.send(2, stored())
        lines = ended(process)[1].splitlines()
        assert [line for line in lines if "stored" not in line] == [
            "gap: 2 batches missing (1..2)",
            "restart: the publisher began anew (#3, then #1)",
            "gap: 1 batch missing (0)",
        ]

    def test_a_clear_after_a_hole_is_no_loss(self, stream: Stream) -> None:
        process = stream.tail("--count", "2")
        for seq in (0, 9):
            stream.send(seq, AllBlocksCleared())
        assert ended(process)[1].splitlines()[1] == "resync: the whole state comes anew (#9, expected #1)"

    def test_an_undecodable_message(self, stream: Stream) -> None:
        process = stream.tail("--count", "1", "--json")
        stream.socket.send_multipart([b"kv", b"\0" * 7, b"\x90"])
        stream.send(0, AllBlocksCleared())
        assert [item["type"] for item in objects(ended(process)[1])] == ["Undecodable", "AllBlocksCleared"]

    def test_joining_late_is_said_on_stderr(self, stream: Stream) -> None:
        process = stream.tail("--count", "1")
        stream.send(5, AllBlocksCleared())
        assert ended(process)[2].startswith("joined at #5")

    def test_silence_says_what_to_look_at(self, stream: Stream) -> None:
        process = stream.tail("--topic", "kv@pod1", "--wait", "0.5")
        stream.send(0, AllBlocksCleared(), topic=b"kv@pod\x1b")
        status, stdout, stderr = ended(process)
        assert (status, stdout) == (1, "")
        expected = f"connected to {stream.endpoint}, 0 messages, subscribed to topic 'kv@pod1', "
        assert stderr == expected + "topics seen: 'kv@pod\\x1b'\n"

    def test_nothing_there_at_all(self) -> None:
        result = run("tcp://127.0.0.1:1", "--wait", "0.2")
        assert result.returncode == 1
        assert result.stderr.splitlines()[1] == (
            "not connected to tcp://127.0.0.1:1, 0 messages, subscribed to topic (all), topics seen: none"
        )

    def test_nobody_there_yet_is_said_once_and_waited_for(self, stream: Stream) -> None:
        stream.socket.unbind(stream.endpoint)
        command = [KVEVENTS, "tail", stream.endpoint, "--count", "1"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        lines = [process.stderr.readline() for _ in range(2)]
        assert lines[1].startswith(f"not connected to {stream.endpoint} yet: ")
        stream.socket.bind(stream.endpoint)
        stream.socket.recv()
        stream.send(0, AllBlocksCleared())
        assert ended(process)[::2] == (0, "")

    def test_a_quiet_publisher_is_not_taken_for_an_absent_one(self, stream: Stream) -> None:
        status, _, stderr = ended(stream.tail("--wait", "2.5"))
        assert (status, stderr.splitlines()[0].partition(" to ")[0]) == (1, "connected")

    def test_waiting_after_a_message_is_fine(self, stream: Stream) -> None:
        process = stream.tail("--wait", "0.3")
        stream.send(0)
        assert ended(process) == (0, "", "")

    def test_interrupted(self, stream: Stream) -> None:
        process = stream.tail()
        process.send_signal(signal.SIGINT)
        status, stdout, stderr = ended(process)
        assert (status, stdout, stderr.strip()) == (130, "", "")

    def test_its_reader_leaves_while_nothing_comes(self, stream: Stream) -> None:
        process = stream.tail()
        process.stdout.close()
        assert process.wait(DEADLINE_S) == 0
        assert process.stderr.read() == ""
        process.stderr.close()


class TestSeveral:
    def test_each_line_says_its_source(self, stream: Stream, other: Stream) -> None:
        process = both(stream, other, "--count", "4", "--color", "always")
        stream.send(0, stored())
        other.send(0, AllBlocksCleared())
        other.send(3, stored())
        stream.send(1, stored())
        status, stdout, stderr = ended(process)
        assert (status, stderr) == (0, f"following {stream.endpoint}, {other.endpoint}\n")
        tags = {line.partition(" ")[0] for line in stdout.splitlines()}
        names = [one.endpoint.removeprefix("tcp://") for one in (stream, other)]
        assert sorted(tag[tag.index("m") + 1 : -4] for tag in tags) == sorted(names)
        gap = next(line for line in stdout.splitlines() if "gap:" in line)
        assert names[1] in gap

    def test_in_json_it_is_a_key(self, stream: Stream, other: Stream) -> None:
        process = both(stream, other, "--count", "1", "--json")
        other.send(0, stored())
        (event,) = objects(ended(process)[1])
        assert (event["source"], event["type"]) == (other.endpoint, "BlockStored")

    def test_a_recording_is_read_as_it_was_seen(self, stream: Stream, tmp_path: Path) -> None:
        path = tmp_path / "r.jsonl"
        process = stream.tail("--count", "3", "--record", str(path), "--json")
        stream.send(0, stored())
        stream.send(4, BlockRemoved([5], "CPU"), AllBlocksCleared())
        seen = objects(ended(process)[1])
        again = run("--input", str(path), "--json")
        assert (again.returncode, objects(again.stdout)) == (0, seen)
        assert [item["type"] for item in seen] == ["BlockStored", "Gap", "BlockRemoved", "AllBlocksCleared"]

    def test_a_topic_that_matches_nothing_is_said(self, stream: Stream) -> None:
        process = stream.tail("--topic", "kv@pod1")
        stream.send(0, AllBlocksCleared(), topic=b"kv@pod2")
        assert process.stderr.readline() == "nothing of topic 'kv@pod1' so far, topics seen: 'kv@pod2'\n"
        process.send_signal(signal.SIGINT)
        assert ended(process)[0] == 130

    def test_a_topic_that_a_recording_does_not_have_is_said(self) -> None:
        result = run("--input", "-", "--topic", "k", stdin=recorded(stored()))
        assert (result.returncode, result.stdout) == (0, "")
        assert result.stderr == "no message of topic 'k', topics there: 'kv'\n"

    def test_a_publisher_that_is_lost_is_said_and_so_is_its_return(self, stream: Stream) -> None:
        process = stream.tail("--count", "1")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2.5)  # its first look is after two seconds
        stream.socket.close(0)
        assert process.stderr.readline() == f"lost {stream.endpoint}: waiting for it\n"
        stream.__init__(stream.context.socket(zmq.XPUB), stream.endpoint)  # type: ignore[misc]
        assert process.stderr.readline() == f"connected to {stream.endpoint} again\n"
        stream.socket.recv()
        stream.send(0, AllBlocksCleared())
        assert ended(process)[0] == 0


class TestSums:
    def test_rates_stand_in_place_of_events(self, stream: Stream) -> None:
        process = stream.tail("--rate", "--json")
        stream.send(0, stored(), stored())
        stream.send(1, BlockRemoved([5, 6], "CPU"))
        line = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        ended(process)
        assert (line["type"], line["batches"], line["stored_events"]) == ("Rate", 2, 2)
        assert (line["stored_blocks"], line["removed_blocks"]) == (2, 2)
        assert 0.9 < line["seconds"] < 5

    def test_a_summary_says_what_is_where(self, stream: Stream) -> None:
        process = stream.tail("--summary", "0.5", "--json")
        stream.send(0, stored("CPU"), stored("GPU"), BlockRemoved([1 << 60], "GPU"))
        line = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        ended(process)
        assert line["resident"] == [{"source": stream.endpoint, "medium": "CPU", "group": 0, "blocks": 1}]

    def test_of_a_recording_it_is_one_line(self) -> None:
        result = run("--input", "-", "--summary", "1", stdin=recorded(stored("CPU")))
        assert "stored 1.0 events/s, 1 blocks/s" in result.stdout
        assert "CPU g0: 1 blocks" in result.stdout

    def test_of_several_each_source_has_a_line(self, stream: Stream, other: Stream) -> None:
        process = both(stream, other, "--summary", "0.7", "--count", "1")
        stream.send(0, stored("CPU"), stored("CPU"), BlockRemoved([5], "CPU"))
        stream.send(3, stored("CPU"))
        status, stdout, _ = ended(process)
        total, first, second = stdout.splitlines()
        assert (status, "2.0 batches/s" in total or "batches lost 2" in total) == (0, True)
        for part in (stream.endpoint, "connected", "s old", "gaps 1", "lost batches 2", "duplicates 1",
                     "removed unknown 1", "CPU: 1 blocks"):  # fmt: skip
            assert part in first
        assert second.startswith(f"  {other.endpoint}  connected  nothing yet  0.0 batches/s")

    def test_in_json_each_source_is_an_object(self, stream: Stream, other: Stream) -> None:
        process = both(stream, other, "--summary", "0.7", "--count", "1", "--json")
        stream.send(0, stored("CPU"))
        (line,) = objects(ended(process)[1])
        first, second = line["sources"]
        assert (first["source"], first["connected"], first["resident"]) == (stream.endpoint, True, {"CPU": 1})
        assert first["age_s"] > 1e9, "the batch says that it is of 1970"
        assert (second["source"], second["age_s"], second["batches"]) == (other.endpoint, None, 0)

    def test_they_are_of_what_is_wanted_and_end_when_they_are_counted(self, stream: Stream) -> None:
        process = stream.tail("--summary", "0.3", "--count", "2", "--json", "--medium", "CPU", "--type", "removed")
        stream.send(0, stored("CPU"), stored("GPU"), BlockRemoved([7], "CPU"), BlockRemoved([7], "GPU"))
        status, stdout, _ = ended(process)
        first, second = objects(stdout)
        assert status == 0
        assert (first["stored_events"], first["removed_events"]) == (0, 1)
        assert second["removed_events"] == 0
        assert [(one["medium"], one["blocks"]) for one in second["resident"]] == [("CPU", 1)]

    def test_a_loss_is_counted_and_what_was_known_is_forgotten(self, stream: Stream) -> None:
        process = stream.tail("--summary", "0.7", "--json")
        stream.send(0, stored("CPU"))
        stream.send(5, stored("STORAGE"))
        line = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        ended(process)
        assert line["lost_batches"] == 4
        assert [one["medium"] for one in line["resident"]] == ["STORAGE"]


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["tcp://127.0.0.1:1", "--input", "x"],
        ["--input", "-", "--wait", "1"],
        ["--input", "/nowhere"],
        ["tcp://127.0.0.1:1", "--count", "0"],
        ["tcp://127.0.0.1:1", "--type", "pinned"],
        ["no-endpoint"],
        ["tcp://127.0.0.1:1", "--replay", "no-endpoint"],
        ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2", "--replay", "tcp://127.0.0.1:3"],
        ["tcp://127.0.0.1:1", "tcp://127.0.0.1:1"],
        ["tcp://127.0.0.1:1", "--rate", "--summary", "1"],
        ["tcp://127.0.0.1:1", "--prefix-of", "a"],
        ["tcp://127.0.0.1:1", "--record", "/nowhere/x"],
        ["--input", "-", "--record", "x"],
        ["--input", "-", "--rate"],
    ],
    ids=" ".join,
)
def test_bad_usage(args: list[str]) -> None:
    result = run(*args)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr


def test_torch_is_not_needed() -> None:
    code = "import sys; sys.modules['torch'] = None; from kvevents_service.cli import main; main()"
    command = [sys.executable, "-W", "error", "-c", code, "tail", "--input", str(VALID[0])]
    assert subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=True).stdout
