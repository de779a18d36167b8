#!/usr/bin/env python3
"""Replay docker/Dockerfile without Docker: its RUN, COPY and ENTRYPOINT, each stage in a root directory of its own.

python tools/docker_check.py [--build-arg NAME=VALUE ...]      as root, on Linux; some minutes

The root of a stage is this machine's own under a layer that takes what is written (overlayfs), in the place of the
base image: so this machine should be a Debian with Python 3.11 or newer. Nothing outside the layers changes.
Then the image's command runs there as its USER without privileges, on a root that is read-only but for its VOLUMEs.
It must become ready, serve the reference engine, be healthy, and end with 0 on SIGTERM, and end before it is ready,
too. PIP_* of the environment are handed on.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
INSIDE = "KVEVENTS_DOCKER_CHECK_INSIDE"
READY_S = 120.0
TRACE = "kvevents_service/data/conversation-200.jsonl"
REQUESTS = 3
CHROOT = shutil.which("chroot", path="/usr/sbin:/usr/bin:/sbin:/bin") or ""
"""The image's PATH has no sbin."""


class Instruction(NamedTuple):
    """One instruction of a Dockerfile, its lines joined. `words`: of the JSON form, else empty."""

    name: str
    text: str

    @property
    def words(self) -> list[str]:
        return json.loads(self.text) if self.text.startswith("[") else []


class Stage(NamedTuple):
    """A FROM and what follows it."""

    base: str
    name: str
    instructions: list[Instruction]

    def last(self, name: str) -> Instruction:
        return [one for one in self.instructions if one.name == name][-1]


def instructions(text: str) -> Iterator[Instruction]:
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in re.sub(r"\s*\\\n\s*", " ", lines).splitlines():
        if line.strip():
            name, _, rest = line.strip().partition(" ")
            yield Instruction(name.upper(), rest.strip())


def stages(text: str) -> list[Stage]:
    """The stages, in order. ARGs before the first FROM are filled in to their bases."""
    found: list[Stage] = []
    arguments: dict[str, str] = {}
    for one in instructions(text):
        if one.name == "FROM":
            base, _, name = re.sub(r"\s+AS\s+", "\0", one.text, flags=re.IGNORECASE).partition("\0")
            found.append(Stage(Template(base).substitute(arguments), name, []))
        elif found:
            found[-1].instructions.append(one)
        else:
            arguments |= assignments(one)
    return found


def assignments(one: Instruction) -> dict[str, str]:
    """What an ENV or ARG sets."""
    pairs = re.findall(r'(\w+)=("[^"]*"|\S*)', one.text)
    return {name: value.strip('"') for name, value in pairs}


# replaying


def say(line: str) -> None:
    sys.stderr.write(f"docker-check: {line}\n")


def sh(*words: str, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, check=True, text=True, **more)  # type: ignore[call-overload, no-any-return]


class Replay:
    """The roots of the stages that are done; `arguments` are those of --build-arg."""

    def __init__(self, work: Path, arguments: dict[str, str]) -> None:
        self.work = work
        self.arguments = arguments
        self.roots: dict[str, Path] = {}

    def root(self, name: str) -> Path:
        """A fresh root: this machine's, under a layer of its own; its Python stands where the image has it."""
        upper, scratch, root = (self.work / part / name for part in ("upper", "scratch", "root"))
        for path in (upper, scratch, root):
            path.mkdir(parents=True)
        sh("mount", "-t", "overlay", "overlay", "-o", f"lowerdir=/,upperdir={upper},workdir={scratch}", str(root))
        for kernel in ("proc", "dev", "sys"):
            sh("mount", "--rbind", f"/{kernel}", str(root / kernel))
        self._place_python(root)
        for gone in ("opt/kvevents", "run/kvevents", "var/lib/kvevents"):
            assert not (root / gone).exists(), f"/{gone} is there before the first step"
        (root / "root").chmod(0o711)
        return root

    def _place_python(self, root: Path) -> None:
        """Python's official image has it in /usr/local."""
        if sys.base_prefix not in ("/usr", "/usr/local"):
            sh("mount", "--bind", sys.base_prefix, str(root / "usr/local"))
            sh("mount", "-o", "remount,bind,ro", str(root / "usr/local"))

    def stage(self, stage: Stage) -> tuple[Path, dict[str, str]]:
        """Replay it; returns its root and environment."""
        name = stage.name or "final"
        say(f"stage {name}, in the place of {stage.base}")
        root = self.roots[name] = self.root(name)
        environment, where = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}, "/"
        environment |= {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
        arguments: dict[str, str] = {}
        for one in stage.instructions:
            if one.name == "ARG":
                arguments |= assignments(one)
                arguments |= {key: value for key, value in self.arguments.items() if key in arguments}
            elif one.name == "ENV":
                environment |= assignments(one)
            elif one.name == "WORKDIR":
                where = one.text
                (root / where.lstrip("/")).mkdir(parents=True, exist_ok=True)
            elif one.name == "COPY":
                self.copy(one, root, where)
            elif one.name == "RUN":
                say(f"RUN {one.text[:100]}")
                sh(CHROOT, str(root), "sh", "-ec", f'cd "$0" && {one.text}', where, env=environment | arguments)
        return root, environment

    def copy(self, one: Instruction, root: Path, where: str) -> None:
        say(f"COPY {one.text}")
        *sources, target = one.text.split()
        source = ROOT
        if sources[0].startswith("--from="):
            source = self.roots[sources.pop(0).removeprefix("--from=")]
        into = root / os.path.join(where, target).lstrip("/")
        into.parent.mkdir(parents=True, exist_ok=True)
        for path in (source / name.lstrip("/") for name in sources):
            if path.is_dir():
                leave = shutil.ignore_patterns("__pycache__") if source is ROOT else None
                shutil.copytree(path, into, symlinks=True, dirs_exist_ok=True, ignore=leave)
            else:
                shutil.copy2(path, into / path.name if target.endswith("/") else into)


# the image's command


class Image(NamedTuple):
    """What a container of the last stage runs, and where."""

    stage: Stage
    root: Path
    environment: dict[str, str]

    def start(self, words: list[str]) -> subprocess.Popen[str]:
        """As its user, without privileges, first of its namespace, on a root that is read-only but for volumes."""
        uid, gid = self.stage.last("USER").text.split(":")
        writable = " ".join(json.loads(self.stage.last("VOLUME").text))
        setup = f"""set -eu
for volume in {writable}; do mount --bind "{self.root}$volume" "{self.root}$volume"; done
mount -o remount,bind,ro "{self.root}"
mount -t proc proc "{self.root}/proc"
exec {CHROOT} "{self.root}" setpriv --reuid {uid} --regid {gid} --clear-groups --no-new-privs --bounding-set=-all \
  --inh-caps=-all -- "$@"
"""
        namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--"]
        environment = {key: value for key, value in self.environment.items() if not key.startswith("PIP_")}
        return subprocess.Popen(
            [*namespaces, "sh", "-c", setup, "sh", *words], env=environment, text=True, stdout=subprocess.PIPE
        )

    def command(self) -> list[str]:
        return [*self.stage.last("ENTRYPOINT").words, *self.stage.last("CMD").words]


def child(outer: subprocess.Popen[str]) -> int:
    """The first process of the container, as it is numbered out here."""
    while not (words := Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()):
        time.sleep(0.01)
    return int(words[0])


def expect(good: bool, what: str) -> None:
    say(f"{'ok' if good else 'FAULT'}: {what}")
    if not good:
        sys.exit(1)


def check_life(image: Image) -> None:
    """Ready, an engine served, healthy, drained."""
    sidecar = image.start(image.command())
    try:
        assert sidecar.stdout is not None
        line = sidecar.stdout.readline()
        expect(line.startswith("{"), "the command becomes ready")
        ready = json.loads(line)
        site = next(image.root.glob("opt/kvevents/lib/python3*/site-packages"))
        trace = f"/{(site / TRACE).relative_to(image.root)}"
        words = ["python", "-m", "kvevents_service.engine", "--trace", trace, "--requests", str(REQUESTS)]
        engine = image.start([*words, "--engine-socket", ready["engine_socket"]])
        counted, _ = engine.communicate(timeout=READY_S)
        expect(engine.returncode == 0, "the reference engine ends well")
        counts = json.loads(counted.splitlines()[-1])
        expect(counts["requests"] == REQUESTS and counts["blocks_stored"] > 0, f"it stored blocks: {counts}")
        check_health(image, ready)
        os.kill(child(sidecar), signal.SIGTERM)
        expect(sidecar.wait(READY_S) == 0, "SIGTERM through the entry point drains: exit 0")
    finally:
        sidecar.kill()


def check_health(image: Image, ready: dict[str, object]) -> None:
    if "admin" not in ready:
        say("SKIPPED: this sidecar has no admin endpoint, so the health check has nothing to ask")
        return
    _, _, command = image.stage.last("HEALTHCHECK").text.partition("CMD ")
    asked = image.start(json.loads(command))
    expect(asked.wait(READY_S) == 0, "HEALTHCHECK")


def check_early_end(image: Image) -> None:
    """What the first process does not handle the kernel does not deliver: that is what tini is for."""
    sidecar = image.start(image.command())
    try:
        first = child(sidecar)
        while b"tini" not in Path(f"/proc/{first}/cmdline").read_bytes()[:8] and sidecar.poll() is None:
            time.sleep(0.01)
        time.sleep(0.5)  # torch takes longer to import
        os.kill(first, signal.SIGTERM)
        expect(sidecar.wait(READY_S) == 128 + signal.SIGTERM, "SIGTERM before it is ready ends it: exit 143")
    finally:
        sidecar.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    told = parser.parse_args().build_arg
    if os.getuid() != 0 or not CHROOT or not all(map(shutil.which, ("unshare", "setpriv", "mount"))):
        sys.exit("docker-check: needs root, and unshare, setpriv, chroot and mount")
    if INSIDE not in os.environ:  # a mount namespace of its own: every mount goes with it
        os.execvpe("unshare", ["unshare", "--mount", sys.executable, *sys.argv], {**os.environ, INSIDE: "1"})
    with TemporaryDirectory(prefix="kvevents-docker-check-") as name:
        work = Path(name)
        work.chmod(0o711)
        sh(
            "mount", "-t", "tmpfs", "-o", "size=8g,mode=711", "tmpfs", name
        )  # a layer cannot lie on what is below it
        try:
            replay = Replay(work, dict(one.split("=", 1) for one in told))
            for stage in stages(DOCKERFILE.read_text()):
                image = Image(stage, *replay.stage(stage))
            check_life(image)
            check_early_end(image)
        finally:
            sh("umount", "-R", "-l", name)
    say("fine")


if __name__ == "__main__":
    main()
