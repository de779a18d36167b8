"""Whether the sidecar can do its work now: a probe through the engine socket, the copies and the journal.

It leaves no trace: it is an observer on the socket; it loads a slot of each rank into memory of its own, whatever
the slot holds, and stores nothing; and it waits until the publisher has sent all that was numbered, numbering
nothing itself. Before an engine has said its layout there are no slots: then a copy is made between two pieces of
scratch memory.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter
from typing import Final, TypeVar

import msgspec

from kvevents_service.core.metadata import TransferMeta
from kvevents_service.errors import KvEventsError, SidecarGone
from kvevents_service.service.publisher import Publisher
from kvevents_service.service.sidecar import Sidecar
from kvevents_service.transfer.arena import HostArena
from kvevents_service.transfer.lanes import Lanes
from kvevents_service.transfer.scratch import scratch_memory
from kvevents_service.transfer.worker import CopyFailed, TransferFuture
from kvevents_service.wire.control import (
    PROTOCOL_VERSION,
    Error,
    Hello,
    Inspect,
    Inspected,
    SidecarMessage,
    Welcome,
)
from kvevents_service.wire.framing import FrameReader, decode_sidecar, encode_message

DEADLINE_S: Final = 2.0
POLL_S: Final = 0.002
READ_BYTES: Final = 65536
SCRATCH_BYTES: Final = 4096
_Answer = TypeVar("_Answer", bound=msgspec.Struct)


class Probed(msgspec.Struct, frozen=True):
    """What a probe found. seconds: of each step it came to. failed: the step that did not end well, and why."""

    ready: bool
    seconds: dict[str, float]
    failed: str | None = None
    why: str | None = None


class Probe:
    """Probes when asked; those who ask meanwhile get the same answer."""

    def __init__(
        self, sidecar: Sidecar, publisher: Publisher, socket_path: str, deadline_s: float = DEADLINE_S
    ) -> None:
        self._deadline_s = deadline_s
        self._sidecar = sidecar
        self._publisher = publisher
        self._path = socket_path
        self._running: asyncio.Task[Probed] | None = None
        self._steps: dict[str, Callable[[], Awaitable[None]]] = {
            "engine_socket": self._engine_socket,
            "copy": self._copy,
            "journal": self._journal,
        }

    def __repr__(self) -> str:
        return f"<Probe of {self._path}>"

    async def ask(self) -> Probed:
        """Ends within its deadline. Whoever asks may leave; the probe goes on for the others."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._probe())
        return await asyncio.shield(self._running)

    async def _probe(self) -> Probed:
        seconds: dict[str, float] = {}
        if self._sidecar.draining:
            return Probed(False, seconds, "open", "the sidecar is draining")
        step = ""
        try:
            async with asyncio.timeout(self._deadline_s):
                for step, perform in self._steps.items():
                    start = perf_counter()
                    await perform()
                    seconds[step] = round(perf_counter() - start, 6)
        except TimeoutError:
            return Probed(False, seconds, step, f"not done within {self._deadline_s:g} s")
        except (OSError, EOFError, KvEventsError) as error:
            return Probed(False, seconds, step, str(error))
        return Probed(True, seconds)

    # the steps

    async def _engine_socket(self) -> None:
        """A hello and a question, as any engine's peer would send them."""
        reader, writer = await asyncio.open_unix_connection(self._path)
        try:
            answers = _Answers(reader)
            writer.write(encode_message(Hello(PROTOCOL_VERSION, "observer", "probe")))
            welcome = await answers.next(Welcome)
            if welcome.boot_id != self._sidecar.boot_id:
                raise SidecarGone("another sidecar answers on the engine socket")
            writer.write(encode_message(Inspect(1)))
            await answers.next(Inspected)
        finally:
            writer.close()

    async def _copy(self) -> None:
        tier = self._sidecar.tier
        if tier is not None and tier.lanes:
            ranks = [*zip(tier.lanes, tier.sizes, strict=True), *zip(tier.below, tier.sizes, strict=False)]
            await asyncio.gather(*(self._through(lanes, sizes) for lanes, sizes in ranks))
            return
        lanes = Lanes(HostArena(1, SCRATCH_BYTES), self._sidecar.clock)
        try:
            await self._through(lanes, (SCRATCH_BYTES,))
        finally:
            lanes.close()
            await asyncio.gather(*lanes.tasks, return_exceptions=True)

    async def _through(self, lanes: Lanes, block_sizes: Sequence[int]) -> None:
        """A store of no block, and a load of one: whatever the first slot holds, it is not looked at."""
        memory = scratch_memory(block_sizes)
        nothing, first = array("i"), array("i", [0])
        copies = [lanes.submit(self._transfer("store", nothing), memory)]
        copies.append(lanes.submit(self._transfer("load", first), memory))
        for copy in copies:
            copy.add_done_callback(asyncio.Future.exception)  # it is looked at, also if nobody waits any more
        try:
            await asyncio.wait(copies)
        finally:
            lanes.drop(memory)  # past the deadline: what waits behind a copy that hangs is not wanted any more
            if all(copy.done() for copy in copies):
                memory.close()
        for copy in copies:
            _check(copy)

    def _transfer(self, kind: str, slots: array[int]) -> TransferMeta:
        return TransferMeta(0, kind, 0, 0, slots, slots, self._sidecar.clock() + self._deadline_s)

    async def _journal(self) -> None:
        """The publisher has come round since now, and has nothing left of what was numbered before."""
        turns, numbered = self._publisher.turns, self._publisher.journal.next_seq
        self._publisher.wake()
        while (  # noqa: ASYNC110 - the publisher knows nothing of probes
            self._publisher.turns == turns or self._publisher.journal.unsent_from < numbered
        ):
            await asyncio.sleep(POLL_S)


class _Answers:
    """Frames of the sidecar, one after another."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._frames = FrameReader()
        self._waiting: list[SidecarMessage] = []

    async def next(self, kind: type[_Answer]) -> _Answer:
        """The next answer, which must be of this kind. SidecarGone if it is not."""
        while not self._waiting:
            data = await self._reader.read(READ_BYTES)
            if not data:
                raise SidecarGone("the engine socket was closed")
            self._waiting = [decode_sidecar(body) for body in self._frames.feed(data)]
        answer = self._waiting.pop(0)
        if isinstance(answer, Error):
            raise SidecarGone(f"{answer.code}: {answer.field}: expected {answer.expected}")
        if not isinstance(answer, kind):
            raise SidecarGone(f"a {type(answer).__name__} came in place of a {kind.__name__}")
        return answer


def _check(copy: TransferFuture) -> None:
    """CopyFailed, unless all that is wrong is what the slot held: the worker has done its work then."""
    error = copy.exception()
    if error is not None and not (isinstance(error, CopyFailed) and error.lost):
        raise error
