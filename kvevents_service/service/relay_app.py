"""`kvevents relay`: engines' own streams, recovered, in any dialect. No tier, no engine socket, no torch.

Each rank has a journal and outputs of its own, on the outputs' ports with the rank's distance from the first added.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq

from kvevents_service.config import OutputConfig, ServeConfig
from kvevents_service.core.metadata import Cleared
from kvevents_service.errors import ConfigError
from kvevents_service.service.event_plane import BoundOutput, Context, EventPlane, bind_events
from kvevents_service.service.lifecycle import LINGER_MS, numbers_of, run_until_signal
from kvevents_service.service.numbering import SequenceStore
from kvevents_service.service.relay import Relay, relay_into
from kvevents_service.sockets import overlap, port_above
from kvevents_service.source_config import SourceConfig


class RelayReady(msgspec.Struct, frozen=True):
    """Where a started relay can be reached, and what it follows; the one line that `kvevents relay` prints."""

    ready: bool
    outputs: list[BoundOutput]
    sources: list[SourceConfig]


class Rank(NamedTuple):
    """One rank's source and outputs."""

    events: EventPlane
    relay: Relay
    numbers: SequenceStore | None


class RelayService:
    """A started relay."""

    def __init__(self) -> None:
        self.ranks: list[Rank] = []

    @property
    def ready(self) -> RelayReady:
        bound = [output for rank in self.ranks for output in rank.events.bound]
        return RelayReady(True, bound, [one.config for rank in self.ranks for one in rank.relay.relayed])

    def parts(self) -> list[Coroutine[None, None, None]]:
        """What runs until it is cancelled."""
        return [part for rank in self.ranks for part in (*rank.events.parts(), rank.relay.run())]

    async def drain(self) -> None:
        """Say that what was relayed is gone: nobody follows it any more."""
        for rank in self.ranks:
            rank.relay.withdraw()
        await asyncio.gather(*(rank.events.flush() for rank in self.ranks))

    def open(self, context: Context, config: ServeConfig, source: SourceConfig, state_dir: Path | None) -> None:
        """Bind one rank's outputs and connect to its source."""
        numbers = numbers_of(state_dir)
        events = bind_events(context, config, numbers)
        relay = relay_into(events, [source])
        self.ranks.append(Rank(events, relay, numbers))
        events.renderer.recovery.sources = relay.sources
        if events.publisher.journal.next_seq:
            events.publisher.publish((Cleared(),))  # what the process before this one knew is not known
        relay.open()

    async def close(self) -> None:
        for rank in self.ranks:
            await rank.relay.close()
            if rank.numbers is not None:
                with suppress(OSError):  # the reservation stands: numbers go on a little higher
                    rank.numbers.close(rank.events.publisher.journal.next_seq)


@asynccontextmanager
async def started_relay(config: ServeConfig) -> AsyncIterator[RelayService]:
    """Everything bound and connected; nothing runs yet. Closes all of it at the end."""
    context: Context = zmq.Context()
    service = RelayService()
    try:
        for rank, (settings, source) in by_rank(config).items():
            service.open(context, settings, source, _state_dir(config, rank))
        yield service
    finally:
        await service.close()
        context.destroy(linger=LINGER_MS)


def by_rank(config: ServeConfig) -> dict[int, tuple[ServeConfig, SourceConfig]]:
    """Each rank's settings and source. ConfigError for ports that two ranks would share."""
    sources = config.ranked_sources()
    if not sources:
        raise ConfigError("sources", "at least one: --from, or a table of [[sources]]")
    first = min(sources)
    outputs = {rank: tuple(_of_rank(one, rank, rank - first) for one in config.event_outputs) for rank in sources}
    _check_ports([output for of_rank in outputs.values() for output in of_rank])
    ranks = {rank: (_with_outputs(config, outputs[rank], rank, source), source) for rank, source in sources.items()}
    _check_subjects([output.subject for settings, _ in ranks.values() for output in settings.nats_outputs])
    return ranks


def _with_outputs(
    config: ServeConfig, outputs: tuple[OutputConfig, ...], rank: int, source: SourceConfig
) -> ServeConfig:
    """A subject may name the source's model."""
    nats = tuple(msgspec.structs.replace(output, dp_rank=rank) for output in config.nats)
    labels = {"model": source.model} | config.labels if source.model else config.labels
    return msgspec.structs.replace(config, outputs=outputs, nats=nats, labels=labels)


def _of_rank(output: OutputConfig, rank: int, more: int) -> OutputConfig:
    moved = {setting: _moved(endpoint, setting, more) for setting, endpoint in output.endpoints().items()}
    return msgspec.structs.replace(output, dp_rank=rank, **moved)


def _moved(endpoint: str, setting: str, more: int) -> str:
    moved = port_above(endpoint, more)
    if moved is None:
        raise ConfigError(setting, f"tcp://HOST:PORT with PORT + {more} below 65536, as there are several ranks")
    return moved


def _check_ports(outputs: list[OutputConfig]) -> None:
    named = [place for output in outputs for place in output.endpoints().items()]
    for (_, endpoint), (setting, other) in combinations(named, 2):
        if overlap(endpoint, other):
            raise ConfigError(setting, f"ports further apart: with all ranks {endpoint} would be needed twice")


def _check_subjects(subjects: list[str]) -> None:
    if len(subjects) != len(set(subjects)):
        raise ConfigError("nats.subject", "{dp_rank} in it, as there are several ranks")


def _state_dir(config: ServeConfig, rank: int) -> Path | None:
    """A directory for each rank's numbers, also where there is one rank: more may come."""
    return None if config.state_dir is None else Path(config.state_dir, f"rank-{rank}")


async def relay(config: ServeConfig, on_ready: Callable[[RelayReady], None]) -> int:
    """Run until a signal; returns the exit code. ConfigError if something cannot be bound or connected."""
    return await run_until_signal(started_relay(config), on_ready, config.stop_s)
