"""`kvevents tail`: streams, or a recording of them, as lines on stdout. All else is on stderr.

0    --count or --wait reached, the reader of stdout has gone, or every line of a recording is valid
1    no message came within --wait, or a line of a recording is invalid
2    bad usage, or an endpoint that cannot be one
130  interrupted
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import IO, Any

import click

from kvevents_service.cli.keys import client_keys, with_keys
from kvevents_service.cli.recording import Reader, Recorder, ReplayEnd, name_of
from kvevents_service.cli.render import HumanLines, Invalid, JsonLines, Look, escape, topic_text
from kvevents_service.cli.tail_filter import TYPES, Filter, PrefixWatch, prompt_tokens
from kvevents_service.cli.tail_follow import Sink, follow
from kvevents_service.cli.tail_printer import Enough, Printer, Tags, json_tags, no_tags, text_tags
from kvevents_service.cli.tail_sums import Sums
from kvevents_service.cli.terminal import chat, discard_stdout, wants_color, write
from kvevents_service.errors import ConfigError
from kvevents_service.subscriber import Batch, Source, Subscriber
from kvevents_service.wire.media import canonical_medium

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
RATE_S = 1.0
_FILE = click.File(encoding="utf-8", errors="surrogateescape")
_SECONDS = click.FloatRange(min=0, min_open=True)


@click.command(
    short_help="Watch event streams.",
    epilog="Exit codes: 0 fine, 1 no message or an invalid line, 2 bad usage, 130 interrupted.",
)
@click.argument("endpoints", metavar="[ENDPOINT]...", nargs=-1)
@click.option(
    "--replay",
    "replays",
    multiple=True,
    metavar="E",
    help="Replay endpoint: show the history first, and fill holes. Once for each ENDPOINT, in their order.",
)
@click.option("--topic", metavar="T", default="", help="Only messages of exactly this topic. [default: all]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="Stop after N events, or lines of sums.")
@click.option(
    "--since",
    type=click.IntRange(min=0),
    metavar="SEQ",
    default=0,
    help="Nothing of smaller numbers; a --replay starts there.",
)
@click.option("--type", "types", multiple=True, type=click.Choice(list(TYPES)), help="Only these events.")
@click.option("--medium", "media", multiple=True, metavar="M", help="Only this tier (GPU, CPU, STORAGE, ...).")
@click.option("--group", "groups", multiple=True, type=int, metavar="G", help="Only this KV cache group.")
@click.option("--lora", "loras", multiple=True, metavar="NAME", help="Only stores of this adapter; '' is none.")
@click.option(
    "--prefix-of",
    metavar="TOKENS",
    help="Only what holds the beginning of this prompt: token ids between commas, or @FILE.",
)
@click.option("--rate", is_flag=True, help="Instead of events: how many a second, every second.")
@click.option(
    "--summary",
    type=_SECONDS,
    metavar="S",
    help="Instead of events: every S seconds their sums, and what is where.",
)
@click.option("--wait", type=_SECONDS, metavar="S", help="Stop after S seconds without a message.")
@click.option("--record", metavar="FILE", help="Write every message to a new file, with its tokens.")
@click.option("--input", "recording", type=_FILE, metavar="FILE", help="Read recorded frames instead; - is stdin.")
@with_keys
@click.option("--tokens", is_flag=True, help="Show token ids: they are the users' prompts.")
@click.option("--full-hashes", is_flag=True, help="Show every hash, in full.")
@click.option("--color", default="auto", type=click.Choice(["auto", "always", "never"]), help="[default: auto]")
def tail(
    endpoints: tuple[str, ...],
    recording: IO[str] | None,
    replays: tuple[str, ...],
    wait: float | None,
    topic: str,
    record: str | None,
    curve_server_key: str | None,
    curve_secret_file: str | None,
    **shown: Any,
) -> int:
    """Watch event streams: one line an event, and one for every gap, restart and undecodable message.

    Of several endpoints each line begins with its source, in a colour of its own.

    \b
    kvevents tail tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558
    kvevents tail tcp://10.0.0.7:5557 tcp://10.0.0.8:5557 --type removed
    kvevents tail tcp://127.0.0.1:5557 --json --type removed | jq .
    kvevents tail tcp://127.0.0.1:5557 --summary 10
    kvevents tail tcp://127.0.0.1:5557 --prefix-of @prompt-tokens.txt
    kvevents tail tcp://127.0.0.1:5557 --record stream.jsonl --count 1000
    kvevents tail --input stream.jsonl --group 1
    """
    live = recording is None
    if live != bool(endpoints) or (not live and (replays or wait or record or shown["rate"])):
        raise click.UsageError("give ENDPOINTs, or --input FILE without --replay, --wait, --record and --rate")
    if len(replays) not in (0, len(endpoints)):
        raise click.UsageError("give --replay once for each ENDPOINT, in their order, or not at all")
    try:
        keys = client_keys(curve_server_key, curve_secret_file)
        asked = replays or (None,) * len(endpoints)
        sources = [
            Source(one, replay, topic=topic, keys=keys) for one, replay in zip(endpoints, asked, strict=True)
        ]
        with ExitStack() as stack:
            sink = _sink([source.name for source in sources], record, stack, **shown)
            if recording is not None:
                tags = partial(_tags, color=sink.printer.lines.look.color, as_json=shown["as_json"])
                return read(recording, sink, topic.encode(), tags)
            # The message about a topic that matches nothing names those that there are.
            seen = bool(topic) or wait is not None
            subscriber = Subscriber(sources, observe_topics=seen, read_tokens=True, since=shown["since"])
            return asyncio.run(follow(subscriber, sink, wait))
    except ConfigError as error:
        chat(f"kvevents tail: {error}")
        return EXIT_USAGE
    except BrokenPipeError:
        discard_stdout()
        return EXIT_OK


def _sink(
    labels: list[str], record: str | None, stack: ExitStack, rate: bool, summary: float | None, **shown: Any
) -> Sink:
    """Where items go: to lines, or to sums; and into a recording."""
    recorder = None if record is None else stack.enter_context(Recorder(record, labels))
    if rate and summary is not None:
        raise click.UsageError("give --rate or --summary, not both")
    period = RATE_S if rate else summary
    printer = _printer(labels, **shown)
    sums = None
    if period is not None:
        sums = Sums(printer.wanted, fold=not rate, as_json=shown["as_json"], count=shown["count"], labels=labels)
    return Sink(printer, sums, period, recorder, write, time.time)


def _printer(
    labels: list[str],
    as_json: bool,
    count: int | None,
    types: tuple[str, ...],
    media: tuple[str, ...],
    groups: tuple[int, ...],
    loras: tuple[str, ...],
    since: int,
    prefix_of: str | None,
    **look: Any,
) -> Printer:
    seen = _look(**look)
    wanted = Filter(
        tuple(TYPES[name] for name in types),
        frozenset(map(canonical_medium, media)),
        frozenset(groups),
        frozenset(loras),
        since,
        None if prefix_of is None else PrefixWatch(prompt_tokens(prefix_of)),
    )
    lines = (JsonLines if as_json else HumanLines)(seen)
    return Printer(lines, wanted, count, write, _tags(labels, seen.color, as_json))


def _tags(labels: list[str], color: bool, as_json: bool) -> Tags:
    if len(labels) < 2:
        return no_tags
    return json_tags if as_json else text_tags(labels, color)


def _look(color: str, tokens: bool, full_hashes: bool) -> Look:
    return Look(wants_color(color), tokens, full_hashes)


def read(recording: IO[str], sink: Sink, topic: bytes, tags: Callable[[list[str]], Tags]) -> int:
    """Print a recording. Its invalid lines are named on stderr, and the exit status is 1 if there are any."""
    status, reader = EXIT_OK, Reader(recording)
    try:
        for one in reader:
            if len(reader.labels) > 1 and sink.printer.tags is no_tags:
                sink.printer.tags = tags(reader.labels)
            if isinstance(one, Invalid):
                status = EXIT_FAILED
                _say_invalid(one, name_of(recording), sink.printer)
            elif isinstance(one, ReplayEnd):
                sink.printer.replay_end()
            elif topic in (b"", one.topic if isinstance(one, Batch) else one.source.topic):
                sink.item(one)
        sink.end()
    except Enough:
        return status
    if topic and topic not in reader.topics:
        there = ", ".join(repr(topic_text(name)) for name in reader.topics) or "none"
        chat(f"no message of topic {topic_text(topic)!r}, topics there: {there}")
    return status


def _say_invalid(invalid: Invalid, name: str, printer: Printer) -> None:
    printer.invalid(invalid)
    note = f" {escape(invalid.note)}:" if invalid.note else ""
    chat(f"{name}:{invalid.line}:{note} {invalid.field}: expected {invalid.expected}")
