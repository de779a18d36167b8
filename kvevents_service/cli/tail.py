"""`kvevents tail`: a stream, or a recording of one, as lines on stdout. All else is on stderr.

0    --count or --wait reached, the reader of stdout has gone, or every line of a recording is valid
1    no message came within --wait, or a line of a recording is invalid
2    bad usage, or an endpoint that cannot be one
130  interrupted
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import IO, Any, NamedTuple

import click
import msgspec

from kvevents_service.cli.keys import client_keys, with_keys
from kvevents_service.cli.render import HumanLines, Invalid, JsonLines, Lines, Look, Origin, escape, topic_text
from kvevents_service.cli.terminal import chat, discard_stdout, until_reader_leaves, wants_color, write
from kvevents_service.errors import ConfigError, WireError
from kvevents_service.subscriber import (
    Back,
    Batch,
    Gap,
    Item,
    Refused,
    Restart,
    Resync,
    Source,
    Stale,
    Subscriber,
    Undecodable,
)
from kvevents_service.wire.codec import Decoded, Skipped, decode_batch
from kvevents_service.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvevents_service.wire.media import canonical_medium
from kvevents_service.wire.recorded import parse_recorded_line

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
HINT_S = 2.0
_FILE = click.File(encoding="utf-8", errors="surrogateescape")
TYPES: dict[str, type[Event]] = {"stored": BlockStored, "removed": BlockRemoved, "cleared": AllBlocksCleared}


class Enough(Exception):
    """--count events are printed."""


class Filter(NamedTuple):
    """Which events are shown; empty means all. A clear is of every medium."""

    types: tuple[type[Event], ...] = ()
    media: frozenset[str] = frozenset()

    def wants(self, event: Event) -> bool:
        if self.types and not isinstance(event, self.types):
            return False
        return not self.media or isinstance(event, AllBlocksCleared) or canonical_medium(event.medium) in self.media


class Printer:
    """Writes what the filter wants, each line flushed at once. Raises Enough after `count` events."""

    def __init__(self, lines: Lines, wanted: Filter, count: int | None, write: Callable[[str], None]) -> None:
        self.lines = lines
        self.wanted = wanted
        self.events = 0
        self._count = count
        self._write = write

    def item(self, item: Item) -> None:
        match item:
            case Batch():
                self.batch(Origin(item.seq, item.batch.ts, item.topic, item.batch.data_parallel_rank), item)
            case Gap():
                self._write(self.lines.gap(item))
            case Restart():
                self._write(self.lines.restart(item))
            case Resync():
                self._write(self.lines.resync(item))
            case Stale():
                self._write(self.lines.stale(item))
            case Back():
                self._write(self.lines.back(item))
            case Undecodable():
                self._write(self.lines.undecodable(item))

    def batch(self, origin: Origin, decoded: Batch | Decoded) -> None:
        for event in in_order(decoded):
            if isinstance(event, Skipped):
                if not self.wanted.types:
                    self._write(self.lines.skipped(origin, event))
            elif self.wanted.wants(event):
                self._write(self.lines.event(origin, event))
                self.events += 1
                if self.events == self._count:
                    raise Enough

    def replay_end(self) -> None:
        self._write(self.lines.replay_end())

    def invalid(self, invalid: Invalid) -> None:
        line = self.lines.invalid(invalid)
        if line is not None:
            self._write(line)


def in_order(decoded: Batch | Decoded) -> Iterator[Event | Skipped]:
    """Events and skipped ones as they stood in the batch."""
    skipped = {item.index: item for item in decoded.skipped}
    events = iter(decoded.batch.events)
    for index in range(len(decoded.batch.events) + len(skipped)):
        yield skipped[index] if index in skipped else next(events)


@click.command(
    short_help="Watch an event stream.",
    epilog="Exit codes: 0 fine, 1 no message or an invalid line, 2 bad usage, 130 interrupted.",
)
@click.argument("endpoint", required=False)
@click.option("--replay", metavar="E", help="Replay endpoint: show the history first, and fill holes.")
@click.option("--topic", metavar="T", default="", help="Only messages of exactly this topic. [default: all]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="Stop after N events.")
@click.option("--type", "types", multiple=True, type=click.Choice(list(TYPES)), help="Only these events.")
@click.option("--medium", "media", multiple=True, metavar="M", help="Only this tier (GPU, CPU, STORAGE, ...).")
@click.option(
    "--wait",
    type=click.FloatRange(min=0, min_open=True),
    metavar="S",
    help="Stop after S seconds without a message.",
)
@click.option("--input", "recording", type=_FILE, metavar="FILE", help="Read recorded frames instead; - is stdin.")
@with_keys
@click.option("--tokens", is_flag=True, help="Show token ids: they are the users' prompts.")
@click.option("--full-hashes", is_flag=True, help="Show every hash, in full.")
@click.option("--color", default="auto", type=click.Choice(["auto", "always", "never"]), help="[default: auto]")
def tail(
    endpoint: str | None,
    recording: IO[str] | None,
    replay: str | None,
    wait: float | None,
    topic: str,
    curve_server_key: str | None,
    curve_secret_file: str | None,
    **shown: Any,
) -> int:
    """Watch an event stream: one line an event, and one for every gap, restart and undecodable message.

    \b
    kvevents tail tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558
    kvevents tail tcp://127.0.0.1:5557 --json --type removed | jq .
    kvevents tail --input proto/vectors/invalid.jsonl
    """
    printer = _printer(**shown)
    try:
        if endpoint is not None and recording is None:
            # With --wait, the message about a topic that matches nothing names those that there are.
            source = Source(endpoint, replay, topic=topic, keys=client_keys(curve_server_key, curve_secret_file))
            subscriber = Subscriber(source, observe_topics=wait is not None, read_tokens=True)
            return asyncio.run(follow(subscriber, printer, wait))
        if endpoint is None and recording is not None and replay is None and wait is None:
            return read(recording, printer, topic.encode())
        raise click.UsageError("give ENDPOINT, or --input FILE without --replay and --wait")
    except ConfigError as error:
        chat(f"kvevents tail: {error}")
        return EXIT_USAGE
    except BrokenPipeError:
        discard_stdout()
        return EXIT_OK


def _printer(
    as_json: bool, count: int | None, types: tuple[str, ...], media: tuple[str, ...], **look: Any
) -> Printer:
    lines = (JsonLines if as_json else HumanLines)(_look(**look))
    wanted = Filter(tuple(TYPES[name] for name in types), frozenset(map(canonical_medium, media)))
    return Printer(lines, wanted, count, write)


def _look(color: str, tokens: bool, full_hashes: bool) -> Look:
    return Look(wants_color(color), tokens, full_hashes)


async def follow(subscriber: Subscriber, printer: Printer, wait_s: float | None) -> int:
    """Print what comes, until `wait_s` seconds without a message or the reader of stdout has gone."""
    seen = False
    async with subscriber, hinting(subscriber):
        chat(f"following {subscriber.sources[0].endpoint}")
        try:
            with until_reader_leaves():
                while True:
                    async with asyncio.timeout(wait_s):
                        item = await anext(subscriber)
                    if isinstance(item, Refused):
                        chat(f"refused by {item.label}: {item.reason}")
                        continue
                    seen = seen or _first(subscriber)
                    printer.item(item)
        except Enough:
            return EXIT_OK
        except TimeoutError:
            if not seen:
                chat(silence(subscriber))
            return EXIT_OK if seen else EXIT_FAILED


@asynccontextmanager
async def hinting(subscriber: Subscriber) -> AsyncIterator[None]:
    """Inside, one line says what to check if nobody is there after HINT_S."""

    async def hint() -> None:
        await asyncio.sleep(HINT_S)
        if not subscriber.connected:
            where = subscriber.sources[0].endpoint
            chat(f"not connected to {where} yet: is a publisher running, and is this its event endpoint (`--pub`)?")

    task = asyncio.create_task(hint())
    try:
        yield
    finally:
        task.cancel()


def _first(subscriber: Subscriber) -> bool:
    if subscriber.joined_at and subscriber.sources[0].replay is None:
        chat(f"joined at #{subscriber.joined_at}: what was before is not shown (--replay asks for it)")
    return True


def silence(subscriber: Subscriber) -> str:
    """What to look at when nothing came."""
    seen = ", ".join(repr(topic_text(topic)) for topic in subscriber.topics_seen) or "none"
    source = subscriber.sources[0]
    topic = repr(topic_text(source.topic.encode())) if source.topic else "(all)"
    state = "connected" if subscriber.connected else "not connected"
    return f"{state} to {source.endpoint}, 0 messages, subscribed to topic {topic}, topics seen: {seen}"


def read(recording: IO[str], printer: Printer, topic: bytes) -> int:
    """Print a recording. Its invalid lines are named on stderr, and the exit status is 1 if there are any."""
    status = EXIT_OK
    for number, line in enumerate(recording, 1):
        try:
            read_line(line, printer, topic)
        except WireError as error:
            status = EXIT_FAILED
            invalid = Invalid(number, note_of(line), error.field, error.expected)
            printer.invalid(invalid)
            note = f" {escape(invalid.note)}:" if invalid.note else ""
            chat(f"{recording.name}:{number}:{note} {error}")
        except Enough:
            break
    return status


def read_line(line: str, printer: Printer, topic: bytes) -> None:
    """Print what a recorded line holds. Raises WireError."""
    recorded = parse_recorded_line(line)
    if recorded is None:
        return
    if recorded.live is None:
        return printer.replay_end()
    seen, seq, payload = recorded.live
    decoded = decode_batch(payload, read_tokens=True)
    if topic in (b"", seen):
        batch = decoded.batch
        printer.batch(Origin(seq, batch.ts, seen, batch.data_parallel_rank), decoded)
    return None


class _Noted(msgspec.Struct):
    note: str = ""


def note_of(line: str) -> str:
    """The note of a line whatever its frames are; "" if it has none."""
    try:
        return msgspec.json.decode(line, type=_Noted).note
    except (ValueError, TypeError, RecursionError):
        return ""
