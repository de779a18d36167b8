"""A process as it runs in a hardened container: another user, no privileges, a read-only root, and PID 1.

Needs root and Linux namespaces; `POSSIBLE` says whether they are here.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
UID = 65_532
DEADLINE_S = 60.0

SETUP = r"""
set -eu
mount --make-rprivate /
writable=$1; shift
if [ "$(stat -c %a /root)" = 700 ] && [ -n "$PYTHON_HOME" ]; then  # a Python that only root could reach
  mkdir -p "$writable/.python"
  mount --bind "$PYTHON_HOME" "$writable/.python"
  mount -t tmpfs -o mode=755 tmpfs /root
  mkdir -p "$PYTHON_HOME"
  mount --move "$writable/.python" "$PYTHON_HOME"
fi
mount --bind "$writable" "$writable"
mount -o remount,bind,ro /
mount -o remount,bind,ro /dev/shm
exec setpriv --reuid 65532 --regid 65532 --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all -- "$@"
"""


def _python_home() -> str:
    """The interpreter's own folder where that is in root's home, else nothing."""
    home = Path(sys.executable).resolve().parents[1]
    return str(home) if home.is_relative_to("/root") else ""


def _possible() -> bool:
    if os.getuid() != 0 or not all(map(shutil.which, ("unshare", "setpriv", "mount"))):
        return False
    return (
        subprocess.run(["unshare", "-mpf", "--mount-proc", "true"], check=False, capture_output=True).returncode
        == 0
    )


POSSIBLE = _possible()


@contextmanager
def writable() -> Iterator[Path]:
    """The one directory that a confined process may write."""
    with TemporaryDirectory(prefix="kvevents-confined-") as name:
        path = Path(name)
        os.chown(path, UID, UID)
        path.chmod(0o700)
        yield path


@contextmanager
def running(directory: Path, *command: str) -> Iterator[subprocess.Popen[str]]:
    """`command` confined: it may write `directory` alone. Killed at the end, if it still runs."""
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": "/nonexistent",
        "PYTHON_HOME": _python_home(),
    }
    namespaces = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
    words = [*namespaces, "--", "sh", "-c", SETUP, "sh", str(directory), *command]
    process = subprocess.Popen(
        words, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            process.communicate(timeout=DEADLINE_S)


def first_process(outer: subprocess.Popen[str]) -> int:
    """The process that is PID 1 inside, by its number out here."""
    children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if words := children.read_text().split():
            return int(words[0])
    raise TimeoutError


def status_of(pid: int, words: Sequence[str]) -> dict[str, str]:
    """Lines of /proc/PID/status."""
    lines = (line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {name: value.strip() for name, value in lines if name in words}
