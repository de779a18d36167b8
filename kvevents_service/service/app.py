"""`kvevents serve`: start, run, stop, readable from top to bottom.

First SIGTERM or SIGINT drains: no new engines, copies under way end, what they announce is sent. A second one, or
`stop_s`, forces. Exit codes:

    0  stopped by a signal, drained
    1  a part of the service failed
    2  the settings cannot work
    3  stopped before it was drained
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

import msgspec

from kvevents_service.config import ServeConfig
from kvevents_service.core.metadata import Cleared
from kvevents_service.errors import ConfigError
from kvevents_service.service.admin import Admin, opened
from kvevents_service.service.engines import EnginePlane
from kvevents_service.service.event_plane import BoundOutput, EventPlane, bind_events
from kvevents_service.service.instruments import Instruments, Watched
from kvevents_service.service.lifecycle import LINGER_MS, numbers_of, run_until_signal
from kvevents_service.service.offload_view import OffloadView
from kvevents_service.service.probe import DEADLINE_S, Probe
from kvevents_service.service.probe_steps import SidecarSteps
from kvevents_service.service.publisher import Publisher
from kvevents_service.service.relay import OUR_MEDIA, Relay, relay_into
from kvevents_service.service.sidecar import Sidecar
from kvevents_service.sockets import new_context


class Ready(msgspec.Struct, frozen=True):
    """Where a started sidecar can be reached, ports resolved; the one line `kvevents serve` prints.

    `pub` to `dp_rank` are those of the first output. `admin` is the URL of metrics and probes.
    """

    ready: bool
    engine_socket: str
    pub: str
    replay: str | None
    topic: str
    dp_rank: int
    first_seq: int
    boot_id: str
    outputs: list[BoundOutput]
    admin: str | None = None


class Service(NamedTuple):
    """A started sidecar."""

    ready: Ready
    sidecar: Sidecar
    plane: EnginePlane
    events: EventPlane
    relay: Relay
    instruments: Instruments
    admin: Admin | None

    @property
    def publisher(self) -> Publisher:
        return self.events.publisher

    def parts(self) -> list[Coroutine[None, None, None]]:
        """What runs until it is cancelled."""
        more = [] if self.admin is None else [self.admin.run()]
        if self.relay.relayed:
            more.append(self.relay.run())
        return [*self.events.parts(), self.sidecar.run(), self.plane.run(), *self.instruments.parts(), *more]

    async def drain(self) -> None:
        """No new engines; wait for copies under way; end sessions; say that every block is gone; send it all."""
        await self.sidecar.drained()
        await self.plane.close()
        self.publisher.send_pending()
        self.sidecar.withdraw()
        self.relay.withdraw()
        await self.events.flush()


@asynccontextmanager
async def started(config: ServeConfig) -> AsyncIterator[Service]:
    """Everything bound and listening; nothing runs yet. Closes all of it at the end."""
    numbers = numbers_of(config.state_dir)
    context = new_context()
    plane = events = relay = admin = instruments = None
    try:
        events = bind_events(context, config, numbers)
        sidecar = Sidecar(config, events.publisher, time.monotonic)
        relay = _relay(config, events)
        events.renderer.recovery.sources = lambda: [*relay.sources(), *sidecar.sources()]
        plane = EnginePlane(sidecar, config.engine_socket)
        instruments = _instruments(sidecar, plane, Watched(events, relay))
        admin = opened(config, instruments, probe_of(sidecar, plane))
        first_seq = events.publisher.journal.next_seq
        if first_seq:
            events.publisher.publish((Cleared(),))  # the bytes of the process before this one are gone
        relay.open()
        ready = _ready(events, sidecar, plane, first_seq, admin)
        yield Service(ready, sidecar, plane, events, relay, instruments, admin)
    finally:
        for part in (admin, instruments):
            if part is not None:
                part.close()
        if relay is not None:
            await relay.close()
        if plane is not None:
            await sidecar.close()
            plane.unlink()
        context.destroy(linger=LINGER_MS)
        if numbers is not None:
            with suppress(OSError):  # the reservation stands: numbers go on a little higher
                numbers.close(events.publisher.journal.next_seq if events else numbers.first_seq)


def _relay(config: ServeConfig, events: EventPlane) -> Relay:
    """Its sources go into our journal, which is that of one rank."""
    ranks = {output.dp_rank for output in config.event_outputs} | {output.dp_rank for output in config.nats}
    sources = config.ranked_sources()
    if sources and set(sources) != ranks:
        expected = f"{', '.join(map(str, sorted(ranks)))}, as the outputs; `kvevents relay` takes several ranks"
        raise ConfigError("sources.dp_rank", expected)
    return relay_into(events, [one for of_rank in sources.values() for one in of_rank], others=OUR_MEDIA)


def _instruments(sidecar: Sidecar, plane: EnginePlane, watched: Watched) -> Instruments:
    return Instruments(
        "serve",
        sidecar.boot_id,
        [watched],
        is_draining=lambda: sidecar.draining,
        look=lambda: OffloadView(sidecar, plane),
    )


def probe_of(sidecar: Sidecar, plane: EnginePlane, deadline_s: float = DEADLINE_S) -> Probe:
    """Through the engine socket, the copies and the journal."""
    steps = SidecarSteps(sidecar, plane.path, deadline_s).steps
    publishers = [sidecar.publisher]
    return Probe(publishers, is_draining=lambda: sidecar.draining, steps=steps, deadline_s=deadline_s)


def _ready(events: EventPlane, sidecar: Sidecar, plane: EnginePlane, first_seq: int, admin: Admin | None) -> Ready:
    first = events.bound[0]
    return Ready(
        ready=True,
        engine_socket=plane.path,
        pub=first.pub,
        replay=first.replay,
        topic=first.topic,
        dp_rank=first.dp_rank,
        first_seq=first_seq,
        boot_id=sidecar.boot_id,
        outputs=events.bound,
        admin=None if admin is None else admin.url,
    )


async def serve(config: ServeConfig, on_ready: Callable[[Ready], None]) -> int:
    """Run until a signal; returns the exit code. ConfigError if something cannot be bound or opened."""
    return await run_until_signal(started(config), on_ready, config.stop_s)
