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

    def __init__(self, socket: zmq.Socket) -> None:
        self.socket = socket
        self.socket.setsockopt(zmq.RCVTIMEO, DEADLINE_S * 1000)
        self.socket.bind("tcp://127.0.0.1:0")
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
    socket = context.socket(zmq.XPUB)
    yield Stream(socket)
    socket.close()
    context.destroy(linger=0)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=DEADLINE_S)
    return process.returncode, stdout, stderr


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
