"""What of this machine could keep a sidecar from working: limits, memory, shared memory, the GPU, the disk."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from kvevents_service.cli.findings import Finding, ok, problem, warning
from kvevents_service.config import ServeConfig
from kvevents_service.errors import install
from kvevents_service.sizes import size_text

MIN_SHM_BYTES: Final = 1 << 30
MIN_FILES: Final = 4096
UNLIMITED: Final = resource.RLIM_INFINITY


class Machine:
    """The files that tell of it. `root` is another place in tests; `limits` are soft limits by their number."""

    def __init__(self, root: Path = Path("/"), limits: dict[int, int] | None = None) -> None:
        self.root = root
        self._limits = limits or {}

    def limit(self, number: int) -> int:
        return self._limits[number] if number in self._limits else resource.getrlimit(number)[0]

    def text(self, path: str) -> str:
        """ "" where there is no such file."""
        try:
            return (self.root / path).read_text(errors="replace")
        except OSError:
            return ""

    def size_bytes(self, path: str) -> int | None:
        """Of the file system there; None if there is none."""
        try:
            found = os.statvfs(self.root / path)
        except OSError:
            return None
        return found.f_frsize * found.f_blocks

    @property
    def memory_bytes(self) -> int:
        """Of the machine, or of the container if that may use less."""
        words = next(
            (line.split() for line in self.text("proc/meminfo").splitlines() if line[:9] == "MemTotal:"), []
        )
        total = int(words[1]) * 1024 if len(words) > 1 else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        allowed = self.text("sys/fs/cgroup/memory.max").strip()
        return min(total, int(allowed)) if allowed.isdigit() else total

    @property
    def gpus(self) -> int:
        return sum(1 for path in (self.root / "dev").glob("nvidia[0-9]*") if path.name[6:].isdigit())


def check_machine(config: ServeConfig, machine: Machine) -> Iterator[Finding]:
    """Everything that needs no peer."""
    yield _memory(config, machine)
    yield _memlock(config, machine)
    yield _shared_memory(machine)
    yield _huge_pages(machine)
    yield _files(machine)
    yield _cuda(machine)
    yield from _disk(config)
    yield from _state_dir(config)


def _host_bytes(config: ServeConfig) -> int:
    return sum(tier.size_bytes for tier in config.tiers if tier.directory is None)


def _memory(config: ServeConfig, machine: Machine) -> Finding:
    wanted, there = _host_bytes(config), machine.memory_bytes
    told = f"the tier takes {size_text(wanted)} of {size_text(there)}"
    if wanted > there:
        return problem("memory", told, "set a smaller host_bytes, or give the container a larger memory limit")
    if wanted > there * 0.9:
        return warning("memory", told, "leave a tenth to the engine and the system: set a smaller host_bytes")
    return ok("memory", told)


def _memlock(config: ServeConfig, machine: Machine) -> Finding:
    limit, wanted = machine.limit(resource.RLIMIT_MEMLOCK), _host_bytes(config)
    if limit == UNLIMITED or limit >= wanted or not machine.gpus:
        told = "unlimited" if limit == UNLIMITED else size_text(limit)
        return ok("memlock", told if machine.gpus else f"{told}; without a GPU nothing is pinned")
    return warning(
        "memlock",
        f"{size_text(limit)} may be locked, the tier has {size_text(wanted)}: some drivers cannot pin it then",
        "ulimit -l unlimited; in a service LimitMEMLOCK=infinity; in a container --ulimit memlock=-1",
    )


def _shared_memory(machine: Machine) -> Finding:
    size = machine.size_bytes("dev/shm")
    remedy = "docker run --shm-size=16g; in Kubernetes an emptyDir with medium: Memory at /dev/shm"
    if size is None:
        return problem("shm", "/dev/shm is not there", remedy)
    if size < MIN_SHM_BYTES:
        return warning("shm", f"/dev/shm has {size_text(size)}: engines may put their memory there", remedy)
    return ok("shm", f"/dev/shm has {size_text(size)}")


def _huge_pages(machine: Machine) -> Finding:
    modes = machine.text("sys/kernel/mm/transparent_hugepage/enabled")
    chosen = modes.partition("[")[2].partition("]")[0] or "unknown"
    if chosen == "never":
        return warning(
            "hugepages",
            "transparent huge pages are off: a large tier costs many page faults",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    return ok("hugepages", f"transparent huge pages: {chosen}")


def _files(machine: Machine) -> Finding:
    limit = machine.limit(resource.RLIMIT_NOFILE)
    if limit != UNLIMITED and limit < MIN_FILES:
        return warning("files", f"{limit} files may be open: a reader or an engine costs a few", "ulimit -n 65536")
    return ok("files", "any number may be open" if limit == UNLIMITED else f"{limit} may be open")


def _cuda(machine: Machine) -> Finding:
    torch, gpus = _torch_version(), machine.gpus
    if torch is None:
        return problem("torch", "not installed: serve cannot start", install("offload"))
    if not gpus:
        return ok("cuda", f"no NVIDIA device; torch {torch}: copies stay on the CPU")
    if "+cpu" in torch:
        return problem("cuda", f"{gpus} NVIDIA devices, and a torch without CUDA ({torch})", "pip install torch")
    if not machine.text("proc/driver/nvidia/version"):
        return problem(
            "cuda", f"{gpus} NVIDIA devices, and no driver", "load the NVIDIA driver; in a container --gpus all"
        )
    return ok("cuda", f"{gpus} NVIDIA devices, torch {torch}")


def _torch_version() -> str | None:
    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def _disk(config: ServeConfig) -> Iterator[Finding]:
    if config.disk_path is None:
        return
    try:
        found = os.statvfs(config.disk_path)
    except OSError as error:
        yield problem(
            "disk", f"{config.disk_path}: {error.strerror}", "make the directory, or set another disk_path"
        )
        return
    if not os.access(config.disk_path, os.W_OK | os.X_OK):
        remedy = f"chown {os.geteuid()} and chmod 700 it, or set another disk_path"
        yield problem("disk", f"{config.disk_path} is not ours to write", remedy)
        return
    free, wanted = found.f_frsize * found.f_bavail, config.disk_bytes or 0
    told = f"{config.disk_path} has {size_text(free)} free, the tier takes {size_text(wanted)}"
    yield problem("disk", told, "set a smaller disk_bytes, or make room") if wanted > free else ok("disk", told)


def _state_dir(config: ServeConfig) -> Iterator[Finding]:
    if config.state_dir is None:
        yield warning(
            "state_dir",
            "not set: event numbers start at 0 after a restart, and readers must find out",
            "--state-dir with a directory that outlives the process",
        )
        return
    try:
        found = os.stat(config.state_dir)
    except FileNotFoundError:
        yield unmade("state_dir", Path(config.state_dir)) or ok("state_dir", f"{config.state_dir} will be made")
        return
    except OSError as error:
        yield problem("state_dir", f"{config.state_dir}: {error.strerror}", "set another state_dir")
        return
    good = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & stat.S_IWOTH
    told = f"{config.state_dir} belongs to user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}"
    remedy = f"chown {os.geteuid()} and chmod 700 it, or set another state_dir"
    yield ok("state_dir", told) if good else problem("state_dir", told, remedy)


def unmade(check: str, directory: Path) -> Finding | None:
    """A directory that is not there, and that we could not make either."""
    above = next(path for path in (*directory.absolute().parents, Path("/")) if path.exists())
    if os.access(above, os.W_OK | os.X_OK):
        return None
    remedy = f"make {directory} for user {os.geteuid()}, or set another place"
    return problem(check, f"{directory} cannot be made: {above} is not ours to write", remedy)
