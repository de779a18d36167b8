"""`kvevents serve` as a process: ready line, signals, exit codes, numbers across lives."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvevents_service.core.residency import Residency
from kvevents_service.engine.client import OffloadClient
from kvevents_service.engine.layout import EngineLayout, SharedMemory, uniform_layers
from kvevents_service.testing import make_chain
from kvevents_service.wire.codec import decode_batch
from kvevents_service.wire.control import PROTOCOL_VERSION, GroupSpec, Hello, Inspect, Memory
from kvevents_service.wire.events import AllBlocksCleared, Event
from kvevents_service.wire.frames import parse_replay_reply, replay_request
from kvevents_service.wire.framing import encode_message

LONG_S = 30
ROOT = Path(__file__).parents[2]
LOCAL = ["--pub", "tcp://127.0.0.1:0", "--replay", "tcp://127.0.0.1:0", "--log-level", "warning"]


class Serve:
    """A sidecar process."""

    def __init__(self, directory: Path, *options: str) -> None:
        socket = str(directory / "engine.sock")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvevents_service", "serve", "--engine-socket", socket, *LOCAL, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ready(self) -> dict[str, object]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def end(self, number: signal.Signals | None = None) -> tuple[int, str]:
        """Exit code and stderr."""
        if number is not None:
            self.process.send_signal(number)
        _, err = self.process.communicate(timeout=LONG_S)
        return self.process.returncode, err


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[object]:
    made: list[Serve] = []

    def start(*options: str) -> Serve:
        made.append(Serve(tmp_path, *options))
        return made[-1]

    yield start
    for one in made:
        if one.process.returncode is None:
            one.process.kill()
            one.process.communicate(timeout=LONG_S)


def store_something(ready: dict[str, object]) -> None:
    memory = SharedMemory.create(64 * 64)
    groups, regions = [GroupSpec(0, "full_attention", 4)], uniform_layers(1, 64, 64)
    layout = EngineLayout("t", "tiny", groups, [Memory(64 * 64)], regions, [memory.fd])
    client = OffloadClient(str(ready["engine_socket"]), layout)
    assert client.wait_connected(LONG_S)
    assert client.step([make_chain(range(16), 4).offer(range(4))])
    assert client.poll(LONG_S).steps[0].stored == 4
    client.close()
    os.close(memory.fd)


def assert_the_state_comes_from(endpoint: object, start: int) -> None:
    """A replay from there is contiguous, clears first and tells what is resident."""
    batches = replayed(endpoint, start)
    assert [seq for seq, _ in batches] == list(range(start, start + len(batches)))
    assert batches[0][1][0] == AllBlocksCleared()
    residency = Residency()
    for _, events in batches:
        residency.apply(events)
    residency.check()
    assert len(residency) == 4


def replayed(endpoint: object, start: int = 0) -> list[tuple[int, list[Event]]]:
    """(number, events) of a replay."""
    batches = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(str(endpoint))
        dealer.send_multipart(replay_request(start))
        while dealer.poll(LONG_S * 1000) and (reply := parse_replay_reply(dealer.recv_multipart())) is not None:
            batches.append((reply.seq, decode_batch(reply.payload).batch.events))
    return batches


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains_and_exits_with_0(serve, number: signal.Signals) -> None:
    sidecar = serve()
    ready = sidecar.ready()
    assert ready["ready"] is True
    store_something(ready)
    assert sidecar.end(number) == (0, "")
    assert not os.path.exists(str(ready["engine_socket"]))


def test_bad_settings_exit_with_2_and_name_the_setting(serve) -> None:
    code, err = serve("--host-bytes", "0").end()
    assert (code, err) == (2, "kvevents serve: host_bytes: expected a positive whole number\n")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--host-bytes", "0", "--disk-bytes", "4096"], "disk_path"),
        (["--host-bytes", "0", "--disk-path", "/tmp"], "disk_bytes"),
        (["--host-bytes", "-1", "--disk-path", "/tmp", "--disk-bytes", "4096"], "host_bytes"),
        (["--host-bytes", "0", "--disk-path", "/dev/null", "--disk-bytes", "4096"], "disk_path"),
        (["--host-bytes", "0", "--disk-path", "/tmp", "--disk-bytes", str(1 << 60)], "disk_bytes"),
        (["--disk-bytes", "4096.0"], "'--disk-bytes'"),
        (["--disk-bytes", "true"], "'--disk-bytes'"),
    ],
)
def test_a_disk_tier_that_cannot_work_exits_with_2_and_is_named(serve, flags: list[str], named: str) -> None:
    code, err = serve(*flags).end()
    assert code == 2
    assert named in err


def test_a_taken_port_exits_with_2(serve) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        other.bind("tcp://127.0.0.1:0")
        taken = other.getsockopt_string(zmq.LAST_ENDPOINT)
        code, err = serve("--pub", taken).end()
    assert code == 2
    assert err.startswith("kvevents serve: pub: expected an endpoint that can be bound")


def test_without_a_state_directory_every_life_starts_at_0(serve) -> None:
    for _ in range(2):
        sidecar = serve()
        ready = sidecar.ready()
        store_something(ready)
        batches = replayed(ready["replay"])
        assert [seq for seq, _ in batches] == list(range(len(batches)))
        assert [len(events) for _, events in batches if events] == [1]
        sidecar.end(signal.SIGKILL)


def test_with_one_numbers_go_on_above_and_a_clear_comes_first(serve, tmp_path: Path) -> None:
    state = ["--state-dir", str(tmp_path / "state")]
    first = serve(*state)
    ready = first.ready()
    store_something(ready)
    used = max(seq for seq, _ in replayed(ready["replay"]))
    first.end(signal.SIGKILL)
    second = serve(*state)
    ready = second.ready()
    assert ready["first_seq"] > used  # type: ignore[operator]
    store_something(ready)
    started = int(ready["first_seq"])  # type: ignore[call-overload]
    batches = replayed(ready["replay"], started)
    assert [seq for seq, _ in batches][:2] == [started, started + 1]
    assert batches[0][1] == [AllBlocksCleared()]
    assert_the_state_comes_from(ready["replay"], used + 1)  # a reader that saw the first life
    assert_the_state_comes_from(ready["replay"], 0)
    assert second.end(signal.SIGTERM) == (0, "")


def test_two_sidecars_never_share_a_state_directory(serve, tmp_path: Path) -> None:
    state = ["--state-dir", str(tmp_path / "state")]
    serve(*state).ready()
    code, err = serve(*state, "--engine-socket", str(tmp_path / "other.sock")).end()
    assert code == 2
    assert "no other sidecar" in err


@pytest.mark.parametrize("package", ["torch", "h11", "prometheus_client"])
def test_without_a_package_the_error_says_what_to_install(package: str) -> None:
    blocked = f"import sys; sys.modules[{package!r}] = None; sys.argv = ['kvevents', 'serve']"
    code = f"{blocked}; import kvevents_service.cli as c; c.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG_S)
    assert done.returncode == 2
    assert done.stderr.startswith(f"kvevents serve: {package}: expected to be installed: pip install")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_first_line_of_the_log_says_what_runs(serve, log_format: str) -> None:
    sidecar = serve("--log-level", "info", "--log-format", log_format, "--host-bytes", "3MiB")
    sidecar.ready()
    code, err = sidecar.end(signal.SIGTERM)
    first = err.splitlines()[0]
    assert code == 0
    assert f"pid {sidecar.process.pid}: host tier of 3 MiB, events as vllm on tcp://127.0.0.1:0" in first
    if log_format == "json":
        lines = [json.loads(line) for line in err.splitlines()]
        assert lines[0]["settings"]["host_bytes"] == 3 << 20
        assert {line["level"] for line in lines} == {"info"}


def test_print_config_says_what_would_run_and_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / "kv.toml").write_text("topic = 'file'\nstop_s = 3\n")
    command = [sys.executable, "-m", "kvevents_service", "serve", "--print-config", "--host-bytes", "3MiB"]
    env = {**os.environ, "KVEVENTS_CONFIG": "kv.toml", "KVEVENTS_TOPIC": "env", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, env=env, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    printed = done.stdout.splitlines()
    assert "host_bytes = 3145728  # --host-bytes" in printed
    assert 'topic = "env"  # KVEVENTS_TOPIC' in printed
    assert "stop_s = 3.0  # kv.toml" in printed


def test_a_variable_that_nobody_reads_exits_with_2(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVEVENTS_HOST_BYTS", "3")
    code, err = serve().end()
    assert (code, "did you mean KVEVENTS_HOST_BYTES?" in err) == (2, True)


def test_a_second_signal_forces_a_stop_that_a_peer_holds_up(serve) -> None:
    sidecar = serve("--log-level", "info")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.connect(str(sidecar.ready()["engine_socket"]))
        peer.sendall(encode_message(Hello(PROTOCOL_VERSION, "observer", "never reads")))
        assert peer.recv(4096)
        for call_id in range(10_000):  # answers that nobody reads: the drain cannot flush them
            peer.sendall(encode_message(Inspect(call_id)))
        sidecar.process.send_signal(signal.SIGTERM)
        assert any("draining" in line for line in sidecar.process.stderr)
        code, err = sidecar.end(signal.SIGTERM)
    assert (code, "stopped before it was drained" in err) == (3, True)
