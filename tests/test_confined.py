"""The sidecar as an ordinary user without privileges, on a read-only file system, as the first process."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import confinement
import pytest

TRACE = confinement.ROOT / "kvevents_service" / "data" / "conversation-200.jsonl"

pytestmark = pytest.mark.skipif(not confinement.POSSIBLE, reason="needs root and namespaces")


@pytest.fixture
def directory() -> Iterator[Path]:
    with confinement.writable() as path:
        yield path


class Confined(NamedTuple):
    """A confined sidecar: its ready line, and its process as it is numbered out here."""

    ready: dict[str, Any]
    pid: int
    outer: Any

    def end(self, number: signal.Signals) -> tuple[int, str]:
        """Exit code and stderr after a signal."""
        os.kill(self.pid, number)
        _, err = self.outer.communicate(timeout=confinement.DEADLINE_S)
        return self.outer.returncode, err


@contextmanager
def serving(directory: Path, *options: str) -> Iterator[Confined]:
    words = (sys.executable, "-m", "kvevents_service", "serve", "--engine-socket", f"{directory}/run/engine.sock")
    addresses = ("--pub", "tcp://127.0.0.1:0", "--replay", "tcp://127.0.0.1:0")
    with confinement.running(directory, *words, *addresses, *options) as outer:
        line = outer.stdout.readline()
        assert line, outer.communicate(timeout=confinement.DEADLINE_S)
        yield Confined(json.loads(line), confinement.first_process(outer), outer)


def test_it_serves_an_engine_and_drains_with_nothing_but_its_directory(directory: Path) -> None:
    state, disk = directory / "state", directory / "disk"
    for made in (state, disk):
        made.mkdir(mode=0o700)
        os.chown(made, confinement.UID, confinement.UID)
    options = ("--state-dir", str(state), "--disk-path", str(disk), "--disk-bytes", str(8 << 20))
    with serving(directory, *options) as sidecar:
        status = confinement.status_of(sidecar.pid, ("Uid", "NSpid", "CapEff", "CapBnd", "NoNewPrivs"))
        assert status["Uid"].split() == ["65532"] * 4
        assert status["NSpid"].split()[-1] == "1"
        assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
        assert status["NoNewPrivs"] == "1"
        words = (sys.executable, "-m", "kvevents_service.engine", "--trace", str(TRACE), "--requests", "3")
        with confinement.running(directory, *words, "--engine-socket", sidecar.ready["engine_socket"]) as engine:
            counted, err = engine.communicate(timeout=confinement.DEADLINE_S)
        assert (engine.returncode, err) == (0, "")
        assert json.loads(counted.splitlines()[-1])["requests"] == 3
        code, err = sidecar.end(signal.SIGTERM)
    assert code == 0, err
    assert list(state.iterdir())


def test_it_makes_private_directories_in_a_volume_that_its_group_may_write(directory: Path) -> None:
    """As Kubernetes mounts one: root's, of the pod's group, mode 2777. docker/kubernetes names these places."""
    volume = directory / "volume"
    volume.mkdir()
    os.chown(volume, 0, confinement.UID)
    volume.chmod(0o2777)
    options = ("--engine-socket", f"{volume}/private/engine.sock", "--state-dir", f"{volume}/state")
    with serving(directory, *options) as sidecar:
        for made in ("private", "state"):
            status = (volume / made).stat()
            assert (status.st_uid, status.st_mode & 0o777) == (confinement.UID, 0o700)
        assert sidecar.end(signal.SIGTERM)[0] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_as_the_first_process_it_takes_signals(directory: Path, number: signal.Signals) -> None:
    """The kernel gives PID 1 only the signals that it handles."""
    with serving(directory) as sidecar:
        assert sidecar.end(number)[0] == 0


def test_it_can_write_nowhere_else(directory: Path) -> None:
    code = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text('x')"
    for place in ("/tmp/x", "/dev/shm/x", "/etc/x", str(confinement.ROOT / "x")):
        with confinement.running(directory, sys.executable, "-c", code, place) as process:
            _, err = process.communicate(timeout=confinement.DEADLINE_S)
        assert process.returncode == 1
        assert "Read-only file system" in err
