"""`kvevents doctor`: each finding of a machine made up for it, and a real one beside a real sidecar."""

import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvevents_service.cli.doctor_machine import UNLIMITED, Machine, check_machine
from kvevents_service.cli.doctor_peers import Stream, check_ports, check_socket, check_streams
from kvevents_service.cli.findings import OK, PROBLEM, WARNING, Finding
from kvevents_service.cli.sidecar_state import Group, Output, State, Tier
from kvevents_service.config import ServeConfig

KVEVENTS = str(Path(sys.executable).with_name("kvevents"))
DEADLINE_S = 60
GIB = 1 << 30


def machine(root: Path, files: dict[str, str] | None = None, **limits: int) -> Machine:
    """A machine of 64 GiB without a GPU."""
    for path, text in {"proc/meminfo": "MemTotal: 67108864 kB\n", **(files or {})}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / "dev" / "shm").mkdir(parents=True, exist_ok=True)
    known = {"memlock": UNLIMITED, "nofile": 65536, **limits}
    return Machine(root, {resource.RLIMIT_MEMLOCK: known["memlock"], resource.RLIMIT_NOFILE: known["nofile"]})


def level(found: list[Finding], check: str) -> str:
    (one,) = [finding for finding in found if finding.check == check]
    assert (one.level == OK) == (not one.remedy)
    return one.level


GPU = {"dev/nvidia0": "", "dev/nvidiactl": "", "proc/driver/nvidia/version": "NVRM"}


@pytest.mark.parametrize(
    ("check", "files", "limits", "settings", "expected"),
    [
        ("memory", {}, {}, {"host_bytes": 8 * GIB}, OK),
        ("memory", {}, {}, {"host_bytes": 60 * GIB}, WARNING),
        ("memory", {}, {}, {"host_bytes": 65 * GIB}, PROBLEM),
        ("memory", {"sys/fs/cgroup/memory.max": f"{4 * GIB}\n"}, {}, {"host_bytes": 8 * GIB}, PROBLEM),
        ("memory", {"sys/fs/cgroup/memory.max": "max\n"}, {}, {"host_bytes": 8 * GIB}, OK),
        ("memlock", {}, {"memlock": 8 << 20}, {}, OK),
        ("memlock", GPU, {"memlock": 8 << 20}, {}, WARNING),
        ("memlock", GPU, {}, {}, OK),
        ("hugepages", {"sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n"}, {}, {}, OK),
        ("hugepages", {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n"}, {}, {}, WARNING),
        ("files", {}, {"nofile": 1024}, {}, WARNING),
        ("files", {}, {"nofile": UNLIMITED}, {}, OK),
        ("cuda", {}, {}, {}, OK),
        ("state_dir", {}, {}, {}, WARNING),
        ("state_dir", {}, {}, {"state_dir": "/tmp/not-there-yet/nor-that"}, OK),
        ("state_dir", {}, {}, {"state_dir": "/proc/1/nowhere"}, PROBLEM),
        ("state_dir", {}, {}, {"state_dir": "/etc/passwd"}, PROBLEM),
        ("disk", {}, {}, {"disk_path": "/nowhere", "disk_bytes": 1}, PROBLEM),
        ("disk", {}, {}, {"disk_path": "/tmp", "disk_bytes": 1 << 60}, PROBLEM),
        ("disk", {}, {}, {"disk_path": "/tmp", "disk_bytes": 4096}, OK),
    ],
)
def test_each_thing_of_a_machine(
    tmp_path: Path,
    check: str,
    files: dict[str, str],
    limits: dict[str, int],
    settings: dict[str, object],
    expected: str,
) -> None:
    found = list(check_machine(ServeConfig(**settings), machine(tmp_path, files, **limits)))  # type: ignore[arg-type]
    assert level(found, check) == expected


def test_a_gpu_needs_a_torch_with_cuda(tmp_path: Path) -> None:
    import torch

    found = list(check_machine(ServeConfig(), machine(tmp_path, GPU)))
    assert level(found, "cuda") == (PROBLEM if "+cpu" in torch.__version__ else OK)


def test_no_shared_memory_is_a_problem(tmp_path: Path) -> None:
    made = machine(tmp_path)
    (tmp_path / "dev" / "shm").rmdir()
    assert level(list(check_machine(ServeConfig(), made)), "shm") == PROBLEM


# ports and the socket


def running(**known: str) -> State:
    """A sidecar of a main group of 16 tokens."""
    fields = {"engine_socket": "/e", "pub": "tcp://127.0.0.1:1", **known}
    tier = Tier("CPU", 1, 1, {}, [Group(0, "full_attention", 16, True), Group(1, "mamba", 64)], {})
    return State(
        version="1", pid=7, boot_id="b", started_at=0, now=0, draining=False, engine_socket=fields["engine_socket"],
        outputs=[Output(fields["pub"], "vllm")], tiers=[tier], engines=[], copies=[], oldest_copy_s=0, events=[],
        errors={},
    )  # fmt: skip


def test_a_taken_port_is_a_problem_unless_a_known_sidecar_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        pub = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        config = ServeConfig(pub=pub, replay=None)
        (found,) = check_ports(config, [])
        assert (found.level, "ss -ltnp" in found.remedy) == (PROBLEM, True)
        (found,) = check_ports(config, [running(pub=pub)])
        assert found.level == OK
    (found,) = check_ports(config, [])
    assert found.level == OK


def test_only_a_port_that_is_taken_is_looked_up() -> None:
    (found,) = check_ports(ServeConfig(pub="tcp://nosuchhost.invalid:80", replay=None, allow_remote=True), [])
    assert (found.level, found.remedy) == (PROBLEM, "set another `pub`")


def test_a_socket_of_events_is_looked_at_as_well(tmp_path: Path) -> None:
    path = tmp_path / "events"
    config = ServeConfig(pub=f"ipc://{path}", replay=None)
    assert [one.level for one in check_ports(config, [])] == [OK]
    path.write_text("a file")
    (found,) = check_ports(config, [])
    assert (found.level, "no other file at" in found.what) == (PROBLEM, True)
    assert not [*check_ports(config, [running(pub=config.pub)])]


def test_a_socket_whose_directory_cannot_be_made() -> None:
    free, directory = check_socket("/proc/1/nowhere/e.sock", [])
    assert (free.level, directory.level, "cannot be made" in directory.what) == (OK, PROBLEM, True)


def test_the_engine_socket_free_stale_taken_and_open_to_all(tmp_path: Path) -> None:
    path = tmp_path / "run" / "e.sock"
    assert [one.level for one in check_socket(str(path), [])] == [OK]
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert [one.level for one in check_socket(str(path), [])] == [PROBLEM]
        assert [one.level for one in check_socket(str(path), [running(engine_socket=str(path))])] == [OK]
    (stale,) = check_socket(str(path), [])
    assert (stale.level, "takes it over" in stale.what) == (OK, True)
    os.chmod(path.parent, 0o777)
    assert [one.level for one in check_socket(str(path), [])] == [OK, PROBLEM]


# streams


def stream(endpoint: str = "tcp://a", batches: int = 3, gaps: int = 0, size: int | None = 16) -> Stream:
    return Stream(endpoint, batches >= 0, max(0, batches), gaps, {} if size is None else {0: {size}, 1: {64}})


@pytest.mark.parametrize(
    ("streams", "states", "levels"),
    [
        ([stream()], [], [OK]),
        ([stream(batches=-1, size=None)], [], [PROBLEM]),
        ([stream(batches=0, size=None)], [], [PROBLEM]),
        ([stream(gaps=2)], [], [WARNING]),
        ([stream()], [running()], [OK, OK]),
        ([stream(size=32)], [running()], [OK, PROBLEM]),
        ([stream(size=None)], [running()], [OK]),
        ([stream(), stream("tcp://b", size=32)], [], [OK, OK, PROBLEM]),
        ([stream(), stream("tcp://b")], [], [OK, OK, OK]),
    ],
)
def test_streams_must_be_there_whole_and_of_one_block_size(
    streams: list[Stream], states: list[State], levels: list[str]
) -> None:
    assert [finding.level for finding in check_streams(streams, states)] == levels


# the command


def run(*options: str, **env: str) -> tuple[int, list[dict[str, str]]]:
    known = {key: value for key, value in os.environ.items() if not key.startswith("KVEVENTS_")}
    done = subprocess.run(
        [KVEVENTS, "doctor", "--json", *options],
        capture_output=True, text=True, timeout=DEADLINE_S, env={**known, **env},
    )  # fmt: skip
    assert done.stderr == ""
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def test_beside_a_running_sidecar_all_is_well(sidecar: dict[str, object], tmp_path: Path) -> None:
    env = {"KVEVENTS_ENGINE_SOCKET": str(sidecar["engine_socket"]), "KVEVENTS_PUB": str(sidecar["pub"])}
    options = ["--admin", str(sidecar["admin"]), str(sidecar["pub"]), "--wait", "3"]
    code, found = run(*options, **env, KVEVENTS_HOST_BYTES="1MiB", KVEVENTS_REPLAY=str(sidecar["replay"]))
    assert [one for one in found if one["level"] == PROBLEM] == []
    assert code == 0
    said = {one["check"]: one["what"] for one in found}
    assert said["port pub"] == f"{sidecar['pub']} is the running sidecar's"
    assert said["engine socket"] == f"{sidecar['engine_socket']} is the running sidecar's"
    assert "no gap" in said[f"stream {sidecar['pub']}"]
    assert "ready" in said[f"sidecar {sidecar['admin']}"]


def test_a_setting_that_cannot_work_is_a_finding() -> None:
    code, found = run("--admin", "http://127.0.0.1:1", KVEVENTS_HOST_BYTES="0")
    assert code == 1
    assert [(one["check"], one["level"]) for one in found] == [
        ("sidecar http://127.0.0.1:1", PROBLEM),
        ("settings", PROBLEM),
    ]
    assert "host_bytes: expected a positive whole number (said by KVEVENTS_HOST_BYTES)" in found[1]["what"]


@pytest.mark.parametrize("options", [["no-endpoint"], ["--admin", "9470"], ["--wait", "0"]])
def test_bad_usage(options: list[str]) -> None:
    done = subprocess.run([KVEVENTS, "doctor", *options], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 2
    assert done.stderr
