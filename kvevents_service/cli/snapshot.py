"""`kvevents snapshot`: ask a snapshot endpoint for the resident set, once. Data on stdout, all else on stderr.

0    a snapshot came, an empty one too
1    none can be had now, or what came is no snapshot
2    bad usage, or an endpoint that cannot be one
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from typing import Final, NamedTuple

import click
import zmq

from kvevents_service.cli.keys import client_keys, with_keys
from kvevents_service.cli.render import JsonLines, Look, Origin, escape, plural
from kvevents_service.cli.terminal import chat, discard_stdout, write
from kvevents_service.core.residency import Residency
from kvevents_service.curve import ClientKeys
from kvevents_service.errors import ConfigError, SidecarGone, WireError
from kvevents_service.handshakes import FAILURES, Door, Monitor
from kvevents_service.sockets import connect
from kvevents_service.wire.codec import decode_batch
from kvevents_service.wire.events import BlockStored, EventBatch
from kvevents_service.wire.frames import (
    SNAPSHOT_EMPTY,
    SNAPSHOT_REQUEST,
    SnapshotReply,
    parse_replay_reply,
    parse_snapshot_reply,
)

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
REPLY_FRAMES: Final = 3
"""Of a replay: topic, number, payload."""
MAX_FRAME_BYTES: Final = 64 * 1024 * 1024


class Snapshot(NamedTuple):
    """A reply and its batches."""

    reply: SnapshotReply
    batches: list[EventBatch]


@click.command(
    short_help="Show what is resident now.",
    epilog="Exit codes: 0 a snapshot came, 1 there is none now, 2 bad usage, 130 interrupted.",
)
@click.argument("endpoint")
@click.option("--json", "as_json", is_flag=True, help="One event a line, as `kvevents tail --json`.")
@click.option("--tokens", is_flag=True, help="With --json: show token ids, they are the users' prompts.")
@with_keys
@click.option(
    "--wait",
    default=30.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    metavar="S",
    help="Give up after S seconds.",
)
def snapshot(
    endpoint: str,
    as_json: bool,
    tokens: bool,
    wait: float,
    curve_server_key: str | None,
    curve_secret_file: str | None,
) -> int:
    """Show what is resident now, from an endpoint of `serve --snapshot`.

    \b
    kvevents snapshot tcp://127.0.0.1:5559
    """
    try:
        reply = ask(endpoint, wait, client_keys(curve_server_key, curve_secret_file))
        found = Snapshot(reply, [decode_batch(payload, read_tokens=as_json).batch for payload in reply.payloads])
    except ConfigError as error:
        chat(f"kvevents snapshot: {error}")
        return EXIT_USAGE
    except (TimeoutError, SidecarGone, WireError) as error:
        chat(f"kvevents snapshot: {str(error) or silence(endpoint, wait)}")
        return EXIT_FAILED
    if reply.seq < SNAPSHOT_EMPTY:
        chat("kvevents snapshot: unavailable now, ask again")
        return EXIT_FAILED
    try:
        for line in json_lines(found, tokens) if as_json else summary(found):
            write(line)
    except BrokenPipeError:
        discard_stdout()
    return EXIT_OK


def silence(endpoint: str, wait_s: float) -> str:
    """What to look at when nothing came."""
    return f"no answer from {endpoint} in {wait_s:g} s: is this the --snapshot endpoint of a `serve` that runs?"


def ask(endpoint: str, wait_s: float, keys: ClientKeys | None = None) -> SnapshotReply:
    """One request. TimeoutError, WireError, ConfigError, or SidecarGone if the publisher does not let us in."""
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        if keys is not None:
            keys.guard(socket)
        monitor = Monitor(context, socket, FAILURES)
        try:
            connect(socket, endpoint, "endpoint")
            socket.send(SNAPSHOT_REQUEST)
            _wait(socket, monitor, Door(keys.public if keys else None), wait_s)
            return _reply(socket.recv_multipart(), endpoint)
        finally:
            socket.disable_monitor()
            monitor.close()


def _reply(frames: list[bytes], endpoint: str) -> SnapshotReply:
    """WireError; SidecarGone if it is what a replay endpoint answers to whatever it is asked."""
    try:
        return parse_snapshot_reply(frames)
    except WireError as error:
        if len(frames) != REPLY_FRAMES:
            raise
        with suppress(WireError):
            parse_replay_reply(frames)
            told = f"{endpoint} is a replay endpoint: --snapshot of `serve` binds another one, see its ready line"
            raise SidecarGone(told) from error
        raise


def _wait(socket: zmq.Socket[bytes], monitor: Monitor, door: Door, wait_s: float) -> None:
    """Until there is an answer. TimeoutError or SidecarGone if there will be none."""
    poller, deadline = zmq.Poller(), time.monotonic() + wait_s
    poller.register(socket, zmq.POLLIN)
    poller.register(monitor.reader, zmq.POLLIN)
    while (left_s := deadline - time.monotonic()) > 0:
        if (socket, zmq.POLLIN) in poller.poll(int(left_s * 1000) + 1):
            return
        for told in monitor.taken():
            door.saw(told)
        if door.refusal:
            raise SidecarGone(door.refusal)
    raise TimeoutError


def summary(found: Snapshot) -> list[str]:
    """The number, who said it, and how many blocks and tokens are where."""
    residency, tokens = Residency(), Counter[tuple[str, int]]()
    for batch in found.batches:
        residency.apply(batch.events)
        for event in batch.events:
            if isinstance(event, BlockStored):
                tokens[event.medium or "GPU", event.group_idx or 0] += len(event.token_ids)
    number = "nothing numbered yet" if found.reply.seq == SNAPSHOT_EMPTY else f"after #{found.reply.seq}"
    lines = [f"{number}  publisher {found.reply.publisher_id.hex()}  {plural(len(residency), 'block')}"]
    for shelf, names in residency.shelves.items():
        where = f"{escape(shelf.medium):<7} g{shelf.group:<2} {plural(len(names), 'block'):>11}"
        lines.append(f"{where}  {plural(tokens[shelf.medium, shelf.group], 'token')}")
    return lines


def json_lines(found: Snapshot, tokens: bool) -> list[str]:
    """Every event as an object with the number of the snapshot."""
    lines = JsonLines(Look(tokens=tokens))
    return [
        lines.event(Origin(found.reply.seq, batch.ts, b"", batch.data_parallel_rank), event)
        for batch in found.batches
        for event in batch.events
    ]
