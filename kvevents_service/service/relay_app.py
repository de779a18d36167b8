"""`kvevents relay`: engines' own streams, recovered, in any dialect. No tier, no engine socket, no torch.

Each rank has a journal and outputs of its own, on the outputs' ports with the rank's distance from the first added.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvevents_service.config import ADMIN_AUTO, ADMIN_OFF, OutputConfig, ServeConfig
from kvevents_service.core.metadata import Cleared
from kvevents_service.errors import ConfigError, not_installed
from kvevents_service.service.event_plane import BoundOutput, Context, EventPlane, bind_events
from kvevents_service.service.instruments import Instruments, Watched
from kvevents_service.service.lifecycle import LINGER_MS, numbers_of, run_until_signal
from kvevents_service.service.numbering import SequenceStore
from kvevents_service.service.probe import Probe
from kvevents_service.service.relay import Relay, relay_into
from kvevents_service.sockets import new_context, overlap, port_above
from kvevents_service.source_config import SourceConfig

if TYPE_CHECKING:
    from kvevents_service.service.admin import Admin

log = logging.getLogger(__name__)


class RelayReady(msgspec.Struct, frozen=True):
    """Where a started relay can be reached, and what it follows; the one line that `kvevents relay` prints.

    `admin` is the URL of metrics and probes.
    """

    ready: bool
    outputs: list[BoundOutput]
    sources: list[SourceConfig]
    boot_id: str
    admin: str | None = None


class Rank(NamedTuple):
    """One rank's sources and outputs."""

    events: EventPlane
    relay: Relay
    numbers: SequenceStore | None


class RelayService:
    """A started relay."""

    def __init__(self) -> None:
        self.ranks: list[Rank] = []
        self.boot_id = uuid.uuid4().hex
        self.draining = False
        self.instruments: Instruments | None = None
        self.admin: Admin | None = None

    @property
    def ready(self) -> RelayReady:
        bound = [output for rank in self.ranks for output in rank.events.bound]
        sources = [one.config for rank in self.ranks for one in rank.relay.relayed]
        return RelayReady(True, bound, sources, self.boot_id, None if self.admin is None else self.admin.url)

    def parts(self) -> list[Coroutine[None, None, None]]:
        """What runs until it is cancelled."""
        parts = [part for rank in self.ranks for part in (*rank.events.parts(), rank.relay.run())]
        parts += [] if self.instruments is None else self.instruments.parts()
        return parts if self.admin is None else [*parts, self.admin.run()]

    async def drain(self) -> None:
        """Say that what was relayed is gone: nobody follows it any more."""
        self.draining = True
        for rank in self.ranks:
            rank.relay.withdraw()
        await asyncio.gather(*(rank.events.flush() for rank in self.ranks))

    def open(
        self, context: Context, config: ServeConfig, sources: Sequence[SourceConfig], state_dir: Path | None
    ) -> None:
        """Bind one rank's outputs and connect to its sources."""
        numbers = numbers_of(state_dir)
        events = bind_events(context, config, numbers)
        relay = relay_into(events, sources)
        self.ranks.append(Rank(events, relay, numbers))
        events.renderer.recovery.sources = relay.sources
        if events.publisher.journal.next_seq:
            events.publisher.publish((Cleared(),))  # what the process before this one knew is not known
        relay.open()

    def watch(self, config: ServeConfig) -> None:
        """Listen for operators, when all ranks are open."""
        watched = [Watched(rank.events, rank.relay) for rank in self.ranks]
        self.instruments = Instruments("relay", self.boot_id, watched, is_draining=lambda: self.draining)
        publishers = [rank.events.publisher for rank in self.ranks]
        self.admin = _admin(config, self.instruments, Probe(publishers, is_draining=lambda: self.draining))

    async def close(self) -> None:
        for part in (self.admin, self.instruments):
            if part is not None:
                part.close()
        for rank in self.ranks:
            await rank.relay.close()
            if rank.numbers is not None:
                with suppress(OSError):  # the reservation stands: numbers go on a little higher
                    rank.numbers.close(rank.events.publisher.journal.next_seq)


@asynccontextmanager
async def started_relay(config: ServeConfig) -> AsyncIterator[RelayService]:
    """Everything bound and connected; nothing runs yet. Closes all of it at the end."""
    context: Context = new_context()
    service = RelayService()
    try:
        for rank, (settings, sources) in by_rank(config).items():
            service.open(context, settings, sources, _state_dir(config, rank))
        service.watch(config)
        yield service
    finally:
        await service.close()
        context.destroy(linger=LINGER_MS)


def _admin(config: ServeConfig, instruments: Instruments, probe: Probe) -> Admin | None:
    """A relay works without what this needs; one that was told an address does not."""
    if config.admin == ADMIN_OFF:
        return None
    try:
        from kvevents_service.service.admin import opened
    except ModuleNotFoundError as error:
        missing = not_installed(error.name or "a package", "admin")
        if config.admin != ADMIN_AUTO:
            raise missing from error
        log.warning("no metrics and no probes: %s", missing)
        return None
    return opened(config, instruments, probe)


def by_rank(config: ServeConfig) -> dict[int, tuple[ServeConfig, list[SourceConfig]]]:
    """Each rank's settings and sources. ConfigError for ports that two ranks would share."""
    sources = config.ranked_sources()
    if not sources:
        raise ConfigError("sources", "at least one: --from, or a table of [[sources]]")
    first = min(sources)
    outputs = {rank: tuple(_of_rank(one, rank, rank - first) for one in config.event_outputs) for rank in sources}
    _check_ports([output for of_rank in outputs.values() for output in of_rank])
    ranks = {
        rank: (_with_outputs(config, outputs[rank], rank, of_rank), of_rank) for rank, of_rank in sources.items()
    }
    _check_subjects([output.subject for settings, _ in ranks.values() for output in settings.nats_outputs])
    return ranks


def _with_outputs(
    config: ServeConfig, outputs: tuple[OutputConfig, ...], rank: int, sources: list[SourceConfig]
) -> ServeConfig:
    """A subject may name the first source's model."""
    model = next((source.model for source in sources if source.model), "")
    nats = tuple(msgspec.structs.replace(output, dp_rank=rank) for output in config.nats)
    labels = {"model": model} | config.labels if model else config.labels
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
