"""Following streams: items to where they go, and on stderr what is wrong with the connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

from kvevents_service.cli.recording import Recorder
from kvevents_service.cli.render import topic_text
from kvevents_service.cli.tail_printer import Enough, Printer
from kvevents_service.cli.tail_sums import Sums
from kvevents_service.cli.terminal import chat, until_reader_leaves
from kvevents_service.subscriber import Batch, Item, Refused, Subscriber

EXIT_OK, EXIT_FAILED = 0, 1
HINT_S: Final = 2.0
LOOK_S: Final = 0.2


class Sink(NamedTuple):
    """Takes items: to `sums`, said every `period_s`, or else to `printer`; and to a recording."""

    printer: Printer
    sums: Sums | None
    period_s: float | None
    recorder: Recorder | None
    write: Callable[[str], None]
    clock: Callable[[], float]

    def item(self, item: Item) -> None:
        if self.recorder is not None and isinstance(item, Batch):
            self.recorder.batch(item)
        (self.printer if self.sums is None else self.sums).item(item)

    def say_sums(self, seconds: float) -> None:
        if self.sums is not None:
            self.write(self.sums.line(self.clock(), seconds))
            self.sums.said()

    def end(self) -> None:
        """Of a recording: its sums, as if it had taken one period."""
        self.say_sums(self.period_s or 1.0)


async def follow(subscriber: Subscriber, sink: Sink, wait_s: float | None) -> int:
    """Show what comes, until `wait_s` seconds without a message or the reader of stdout has gone."""
    seen = False
    if sink.sums is not None:
        sink.sums.connections = lambda: subscriber.connections
    async with subscriber, watching(subscriber):
        chat(f"following {', '.join(source.endpoint for source in subscriber.sources)}")
        try:
            with until_reader_leaves():
                async for item in _items(subscriber, wait_s, sink):
                    if isinstance(item, Refused):
                        chat(f"refused by {item.label}: {item.reason}")
                        continue
                    seen = seen or _first(subscriber)
                    sink.item(item)
        except Enough:
            return EXIT_OK
        except TimeoutError:
            if not seen:
                chat(silence(subscriber))
        return EXIT_OK if seen else EXIT_FAILED


async def _items(subscriber: Subscriber, wait_s: float | None, sink: Sink) -> AsyncIterator[Item]:
    """Items; sums are said in between. TimeoutError after `wait_s` without one."""
    now = asyncio.get_running_loop().time
    said = heard = now()
    while True:
        due = None if sink.period_s is None else said + sink.period_s
        quiet = None if wait_s is None else heard + wait_s
        try:
            async with asyncio.timeout_at(min((at for at in (due, quiet) if at is not None), default=None)):
                item = await anext(subscriber)
        except TimeoutError:
            if quiet is not None and now() >= quiet:
                raise
        else:
            heard = now()
            yield item
        if due is not None and now() >= due:
            sink.say_sums(now() - said)
            said = now()


@asynccontextmanager
async def watching(subscriber: Subscriber) -> AsyncIterator[None]:
    """Inside, what is wrong is said once: nobody there, somebody lost, a topic that matches nothing."""
    task = asyncio.create_task(_watch(subscriber))
    try:
        yield
    finally:
        task.cancel()


async def _watch(subscriber: Subscriber) -> None:
    await asyncio.sleep(HINT_S)
    before = subscriber.connections
    for label, connected in before.items():
        if not connected:
            chat(f"not connected to {label} yet: is a publisher running, and is this its event endpoint (`--pub`)?")
    _hint_at_topics(subscriber)
    ever = {label for label, connected in before.items() if connected}
    while True:
        await asyncio.sleep(LOOK_S)
        after = subscriber.connections
        for label, connected in after.items():
            if connected and not before[label] and label in ever:
                chat(f"connected to {label} again")
            elif before[label] and not connected:
                chat(f"lost {label}: waiting for it")
        ever |= {label for label, connected in after.items() if connected}
        before = after


def _hint_at_topics(subscriber: Subscriber) -> None:
    wanted = subscriber.sources[0].topic.encode()
    seen = subscriber.topics_seen
    if wanted and seen and wanted not in seen:
        there = ", ".join(repr(topic_text(topic)) for topic in seen)
        chat(f"nothing of topic {topic_text(wanted)!r} so far, topics seen: {there}")


def _first(subscriber: Subscriber) -> bool:
    """Of the first source: whether all is shown that was asked for."""
    joined_at, asks = subscriber.joined_at or 0, subscriber.sources[0].replay is not None
    if joined_at > subscriber.since and not asks:
        chat(f"joined at #{joined_at}: what was before is not shown (--replay asks for it)")
    elif 0 < subscriber.since < joined_at:
        chat(f"from #{joined_at} on: the publisher does not have #{subscriber.since} any more")
    return True


def silence(subscriber: Subscriber) -> str:
    """What to look at when nothing came."""
    seen = ", ".join(repr(topic_text(topic)) for topic in subscriber.topics_seen) or "none"
    sources = subscriber.sources
    topic = repr(topic_text(sources[0].topic.encode())) if sources[0].topic else "(all)"
    state = "connected" if subscriber.connected else "not connected"
    where = ", ".join(source.endpoint for source in sources)
    return f"{state} to {where}, 0 messages, subscribed to topic {topic}, topics seen: {seen}"
