"""Copies of a device that are slow, fail, overtake each other and lose their engine: no wrong byte, none left open.

Streams are held and let go, calls fail, marks come late, engines leave. What a transfer has read or written may be
overwritten as soon as its future has ended, and is at once, with bytes never stored: a copy that was still
running would carry them, or lose the new ones.
"""

import asyncio
import itertools
from array import array
from collections.abc import Callable

from gpu_world import BLOCKS, GpuWorld
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvevents_service.core.metadata import TransferMeta
from kvevents_service.testing import ManualClock
from kvevents_service.transfer.arena import HostArena
from kvevents_service.transfer.cuda_memory import CudaMemory
from kvevents_service.transfer.lanes import Lanes
from kvevents_service.transfer.worker import CopyFailed, TransferFuture

SLOTS, BLOCK_BYTES, WAIT_S = 12, 88, 10.0
PLACES = st.lists(st.integers(0, min(BLOCKS, SLOTS) - 1), min_size=1, max_size=3, unique=True)
CALLS = ("cuMemcpyBatchAsync_v2", "cuEventRecord", "cuEventSynchronize", "cuStreamWaitEvent")


class Copies(RuleBasedStateMachine):
    """Transfers of block n go to slot n and back: what is `busy` belongs to one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(lambda _, context: self.wrong.append(context.get("exception") or context))
        self.wrong: list[object] = []
        self.world = GpuWorld(slow_s=0.0003)
        self.clock = ManualClock(100.0)
        self.arena = HostArena(SLOTS, BLOCK_BYTES)
        self.lanes = self.wait(self.made_lanes())
        self.patterns = itertools.count(1)
        self.blocks: dict[int, bytes] = {}
        self.slots = {slot: bytes(BLOCK_BYTES) for slot in range(SLOTS)}
        self.busy: dict[TransferFuture, set[int]] = {}
        self.held: set[str] = set()
        self.leaving: list[CudaMemory] = []
        self.join()

    async def made_lanes(self) -> Lanes:
        return Lanes(self.arena, self.clock)

    def wait(self, what):  # type: ignore[no-untyped-def]
        return self.loop.run_until_complete(asyncio.wait_for(what, WAIT_S))

    def until(self, what: Callable[[], bool]) -> None:
        async def poll() -> None:
            while not what():
                await asyncio.sleep(0.0005)

        self.wait(poll())

    def join(self) -> None:
        self.event, handle = self.world.event()
        self.memory = self.world.attach((handle,))
        self.mark = 0
        for block in range(BLOCKS):
            self.fill(block)

    def fill(self, block: int) -> None:
        self.blocks[block] = bytes([next(self.patterns) % 251 + 1]) * BLOCK_BYTES
        for region, start in zip(self.world.regions, (0, 24, 48), strict=True):
            place = region.offset_bytes + block * region.stride_bytes
            part = self.blocks[block][start : start + region.block_bytes]
            self.world.library.memory[self.world.address].map[place : place + len(part)] = part

    # transfers

    @rule(places=PLACES, kind=st.sampled_from(["store", "load"]), ahead=st.sampled_from([None, 0, 1]))
    def transfer(self, places: list[int], kind: str, ahead: int | None) -> None:
        self.submit(places, kind, ahead)

    def submit(self, places: list[int], kind: str, ahead: int | None) -> None:
        free = [place for place in places if not any(place in taken for taken in self.busy.values())]
        if not free:
            return
        numbers = array("i", free)
        meta = TransferMeta(1, kind, 1, 1, numbers, numbers, 1e9)
        mark = None if ahead is None else self.mark + ahead

        async def submitted() -> TransferFuture:
            return self.lanes.submit(meta, self.memory, mark)

        future = self.wait(submitted())
        self.busy[future] = set(free)
        future.add_done_callback(self.ended)

    def ended(self, future: TransferFuture) -> None:
        """Its blocks and slots are free: check what came, and overwrite the sources at once."""
        taken, good = self.busy.pop(future), future.exception() is None
        assert good or isinstance(future.exception(), CopyFailed)
        for place in taken:
            if future.meta.kind == "store":
                self.slots[place] = self.blocks[place] if good else bytes(self.arena.bytes_of(place, 1))
                assert bytes(self.arena.bytes_of(place, 1)) == self.slots[place]
            else:
                if good:
                    assert self.world.block(place) == self.slots[place]
                self.slots[place] = bytes([next(self.patterns) % 251 + 1]) * BLOCK_BYTES
                self.arena.bytes_of(place, 1)[:] = self.slots[place]
            self.fill(place)

    @rule()
    def reach(self) -> None:
        """The engine has submitted its next pass."""
        self.mark += 1
        self.world.library.events[self.event].reach(self.world.library.events[self.event].record())

        async def note() -> None:
            self.memory.marks.note(self.mark)

        self.wait(note())

    @rule()
    def turn(self) -> None:
        self.wait(asyncio.sleep(0.001))

    # trouble

    @rule(kind=st.sampled_from(["store", "load"]))
    def hold(self, kind: str) -> None:
        self.held.add(kind)
        self._stream(kind).gate.clear()

    @rule(kind=st.sampled_from(["store", "load"]))
    def let_go(self, kind: str) -> None:
        self.held.discard(kind)
        self._stream(kind).gate.set()

    def _stream(self, kind: str):  # type: ignore[no-untyped-def]
        return self.world.library.streams[self.memory.device._streams[kind]]

    @rule(call=st.sampled_from(CALLS))
    def fail_next(self, call: str) -> None:
        if not self.held:  # a failed call is followed by a wait for the stream
            self.world.library.fail[call] = 2

    @rule()
    def leave(self) -> None:
        """The engine is gone: its memory is closed when its last copy has ended, and another engine comes."""

        async def drop() -> None:
            self.lanes.drop(self.memory)

        self.wait(drop())
        self.turn()
        for kind in ("store", "load"):
            self.let_go(kind)
        self.until(lambda: not self.busy)
        self.memory.close()
        self.join()

    @rule()
    def load_beside_a_store_that_is_held(self) -> None:
        self.let_go("load")
        self.hold("store")
        free = [place for place in range(SLOTS) if not any(place in taken for taken in self.busy.values())]
        self.submit(free[:1], "store", None)
        self.submit(free[1:2], "load", None)
        loads = [future for future, taken in self.busy.items() if taken == set(free[1:2])]
        self.until(lambda: all(future.done() for future in loads))

    @invariant()
    def nothing_was_wrong_when_a_transfer_ended(self) -> None:
        assert self.wrong == []

    @invariant()
    def what_is_not_busy_is_as_it_was_left(self) -> None:
        taken = set().union(*self.busy.values())
        for place in set(range(SLOTS)) - taken:
            assert bytes(self.arena.bytes_of(place, 1)) == self.slots[place]
            assert self.world.block(place) == self.blocks[place]

    def teardown(self) -> None:
        for kind in ("store", "load"):
            self.let_go(kind)
        self.reach()
        self.reach()
        self.until(lambda: not self.busy)
        self.nothing_was_wrong_when_a_transfer_ended()
        self.what_is_not_busy_is_as_it_was_left()

        async def close() -> None:
            self.lanes.close()
            await asyncio.gather(*self.lanes.tasks, return_exceptions=True)

        self.wait(close())
        self.memory.close()
        self.world.library.forget()
        self.loop.close()


Copies.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestCopies = Copies.TestCase
