"""What is running, and whether it fits together: ports, the engine socket, sidecars, streams that routers read."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvevents_service.cli.doctor_machine import unmade
from kvevents_service.cli.findings import Finding, ok, problem, warning
from kvevents_service.cli.render import escape, plural
from kvevents_service.cli.sidecar_state import State, readiness_of, state_of
from kvevents_service.config import ServeConfig
from kvevents_service.errors import ConfigError, SidecarGone
from kvevents_service.sockets import is_stale
from kvevents_service.subscriber import Batch, Gap, Subscriber
from kvevents_service.wire.events import BlockStored

ANSWER_S = 3.0


class Stream(NamedTuple):
    """What was heard of one event endpoint. block_sizes: tokens in a block, by group."""

    endpoint: str
    connected: bool
    batches: int
    gaps: int
    block_sizes: dict[int, set[int]]


def check_ports(config: ServeConfig, running: Sequence[State]) -> Iterator[Finding]:
    """Each TCP port that `serve` would take. One that a sidecar we know has is no fault."""
    outputs = [output for state in running for output in state.outputs]
    ours = {endpoint for output in outputs for endpoint in (output.pub, output.replay, output.snapshot)}
    for output in config.event_outputs:
        for setting, endpoint in output.endpoints().items():
            if endpoint.startswith("tcp://"):
                yield _port(setting, endpoint, known=endpoint in ours)
            elif endpoint not in ours:
                yield from _path(f"{setting} socket", endpoint.removeprefix("ipc://"), setting)


def _port(setting: str, endpoint: str, *, known: bool) -> Finding:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    name = "" if host == "*" else host.strip("[]")
    try:
        with socket.create_server((name, int(port)), family=socket.AF_INET6 if ":" in name else socket.AF_INET):
            return ok(f"port {setting}", f"{endpoint} is free")
    except OSError as error:
        if known:
            return ok(f"port {setting}", f"{endpoint} is the running sidecar's")
        another = f"set another `{setting}`"
        taken = error.errno == errno.EADDRINUSE
        remedy = f"ss -ltnp 'sport = :{port}' says who has it; or {another}" if taken else another
        return problem(f"port {setting}", f"{endpoint} cannot be bound: {error.strerror}", remedy)


def check_socket(path: str, running: Sequence[State]) -> Iterator[Finding]:
    """The engine socket and its directory."""
    if any(state.engine_socket == path for state in running):
        yield ok("engine socket", f"{path} is the running sidecar's")
    else:
        yield from _path("engine socket", path, "engine_socket")
    yield from _directory(Path(path).parent)


def _path(check: str, path: str, setting: str) -> Iterator[Finding]:
    """A Unix domain socket that `serve` would make."""
    try:
        stale = is_stale(path, setting)
    except ConfigError as error:
        remedy = f"stop what has it, or set another {setting}"
        yield problem(check, f"{path} cannot be taken: expected {error.expected}", remedy)
    else:
        told = "was left by a process that is gone; serve takes it over" if stale else "is free"
        yield ok(check, f"{path} {told}")


def _directory(directory: Path) -> Iterator[Finding]:
    try:
        found = directory.stat()
    except FileNotFoundError:
        missing = unmade("engine socket", directory)
        yield from [] if missing is None else [missing]
        return
    except OSError as error:
        yield problem("engine socket", f"{directory}: {error.strerror}", "set another engine_socket")
        return
    shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX
    if shared or found.st_uid not in (0, os.getuid()):
        told = f"{directory} belongs to user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}"
        yield problem("engine socket", told, f"chown {os.getuid()} and chmod 700 {directory}")


def check_sidecars(urls: Sequence[str], ours: str) -> Iterator[Finding | State]:
    """Each sidecar's own word. `ours` is the version of this command. A state comes with what was found."""
    for url in urls:
        check = f"sidecar {url}"
        try:
            state, readiness = state_of(url, ANSWER_S), readiness_of(url, ANSWER_S)
        except SidecarGone as error:
            yield problem(check, str(error), "is it running, and is this the `admin` of its ready line?")
            continue
        yield state
        if state.version != ours:
            told = f"it is {state.version}, this command {ours}"
            yield warning(f"{check} version", told, "upgrade the older one; the wire between them is versioned")
        if readiness.ready:
            yield ok(check, f"ready, pid {state.pid}, {plural(len(state.engines), 'engine')}")
        else:
            remedy = "see its log; `kvevents top` shows what waits"
            yield problem(check, f"not ready: {readiness.failed}: {readiness.why}", remedy)


async def listen(endpoints: Sequence[str], wait_s: float) -> list[Stream]:
    """Everything that each endpoint says for `wait_s`."""
    heard = {endpoint: Heard() for endpoint in endpoints}
    async with Subscriber(endpoints) as subscriber:
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                async for item in subscriber:
                    if isinstance(item, Batch | Gap):
                        heard[item.source.label].take(item)
        connected = subscriber.connections
    return [Stream(name, connected[name], one.batches, one.gaps, one.sizes) for name, one in heard.items()]


class Heard:
    """Counts what one endpoint says."""

    def __init__(self) -> None:
        self.batches = self.gaps = 0
        self.sizes: dict[int, set[int]] = {}

    def take(self, item: Batch | Gap) -> None:
        if isinstance(item, Gap):
            self.gaps += 1
            return
        self.batches += 1
        for event in item.batch.events:
            if isinstance(event, BlockStored):
                self.sizes.setdefault(event.group_idx or 0, set()).add(event.block_size)


def check_streams(streams: Sequence[Stream], running: Sequence[State]) -> Iterator[Finding]:
    """Whether they are there, whole, and of one block size, which is also that of the sidecars' tiers."""
    for stream in streams:
        yield _stream(stream)
    yield from _sizes({escape(stream.endpoint): _main_sizes(stream) for stream in streams}, running)


def _stream(stream: Stream) -> Finding:
    check = f"stream {escape(stream.endpoint)}"
    if not stream.connected:
        return problem(check, "nobody is there", "is it the `pub` of the ready line, and is the way to it open?")
    if not stream.batches:
        return problem(check, "connected, and nothing came", "heartbeat_s of the publisher, or --wait longer")
    if stream.gaps:
        return warning(check, f"{plural(stream.gaps, 'gap')} in {plural(stream.batches, 'batch', 'batches')}",
                       "read faster, or raise send_high_water_mark; replay fills the holes")  # fmt: skip
    return ok(check, f"{plural(stream.batches, 'batch', 'batches')}, no gap")


def _main_sizes(stream: Stream) -> set[int]:
    """Of the smallest group: the one that readers know which know one."""
    return stream.block_sizes[min(stream.block_sizes)] if stream.block_sizes else set()


def _sizes(heard: dict[str, set[int]], running: Sequence[State]) -> Iterator[Finding]:
    where = {f"{name} says": sizes for name, sizes in heard.items() if sizes}
    for state in running:
        main = {group.block_size for tier in state.tiers for group in tier.groups if group.main}
        if main:
            where[f"the sidecar with pid {state.pid} stores"] = main
    if len(where) < 2:
        return
    told = ", ".join(f"{name} {' and '.join(map(str, sorted(sizes)))} tokens" for name, sizes in where.items())
    if len(set().union(*where.values())) > 1:
        remedy = "give engines and routers one block size (--block-size, --kv-block-size): others never match"
        yield problem("block size", told, remedy)
    else:
        yield ok("block size", told)
