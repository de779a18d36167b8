"""Sidecar side: us per block of a whole step in one process without sockets, until its batch is encoded.

Timed, stage by stage: reading and decoding the step frame, the scheduler's step, the completion of an instant
copy, turning announcements into events, encoding the batch (with the journal), encoding the answer.
Peer: vLLM's scheduler prepare + complete + take_events, and its publisher's encode, for the same steps.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable

from benchmarks.harness import (
    BLOCK_TOKENS,
    HASH_BYTES,
    STEP_CASES,
    WARM_UP,
    Spread,
    StepCase,
    a_board,
    make_chain,
    note,
    report_steps,
)
from kvevents_service.cli.tuning import GC_THRESHOLD
from kvevents_service.core.announce import to_event
from kvevents_service.core.commands import Command, Copy, Publish, Reply
from kvevents_service.core.journal import Journal
from kvevents_service.core.scheduler import OffloadScheduler
from kvevents_service.core.tier import TierSpec
from kvevents_service.engine.offers import make_offer
from kvevents_service.wire.codec import encode_batch
from kvevents_service.wire.control import GroupSpec, Step
from kvevents_service.wire.events import EventBatch
from kvevents_service.wire.framing import FrameReader, decode_client, encode_message

TARGET_US = 5.0
"""The design's 200k blocks/s through one sidecar."""
SESSION = 1
STAGES = ("decode", "step", "complete", "announce", "encode", "reply")
PEER_STAGES = ("prepare", "complete", "take_events", "encode")


class Stopwatch:
    """Seconds per stage; `lap` ends one."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] += now - self._last
        self._last = now

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


class Bench:
    """The sidecar's parts without its shell."""

    def __init__(self, case: StepCase) -> None:
        group = GroupSpec(0, "full_attention", BLOCK_TOKENS)
        self.case = case
        spec = TierSpec("CPU", case.capacity_blocks, HASH_BYTES, (group,), BLOCK_TOKENS, board=a_board())
        self.scheduler = OffloadScheduler(spec)
        self.scheduler.hello(SESSION, case.blocks)
        self.journal = Journal()
        self.reader = FrameReader()

    def frame(self, number: int) -> bytes:
        """A step as it arrives. Not timed."""
        chain = make_chain(number, self.case.blocks)
        offer = make_offer(chain.request_id, chain.block_hashes, chain.token_ids, range(self.case.blocks))
        return bytes(encode_message(Step(number, [offer])))

    def run(self, number: int) -> Stopwatch:
        frame = self.frame(number)
        watch = Stopwatch()
        (body,) = self.reader.feed(frame)
        step = decode_client(body)
        watch.lap("decode")
        assert isinstance(step, Step)
        commands = self.scheduler.step(SESSION, step, 0.0)
        watch.lap("step")
        self.perform(commands, watch)
        return watch

    def perform(self, commands: Iterable[Command], watch: Stopwatch) -> None:
        for command in commands:
            match command:
                case Publish(announcements):
                    self.publish(announcements, watch)
                case Copy(transfer):
                    ended = self.scheduler.complete(transfer)
                    watch.lap("complete")
                    self.perform(ended, watch)
                case Reply(message=message):
                    encode_message(message)
                    watch.lap("reply")

    def publish(self, announcements: tuple, watch: Stopwatch) -> None:  # type: ignore[type-arg]
        seq = self.journal.append(announcements, 0.0)
        batch = self.journal.take_pending()
        assert batch is not None
        events = [to_event(item) for item in batch.announcements]
        watch.lap("announce")
        self.journal.retain(seq, encode_batch(EventBatch(batch.ts, events, 0)))
        del events  # freeing the lists of tokens costs, too
        watch.lap("encode")


def measure(case: StepCase) -> list[Stopwatch]:
    """Every run's times of one case."""
    bench = Bench(case)
    watches = [bench.run(number) for number in range(case.runs + WARM_UP)]
    stats = bench.scheduler.stats()
    assert stats["blocks_stored"] == case.blocks * len(watches), stats
    assert bool(stats["blocks_removed"]) == case.evicting, stats
    return watches[WARM_UP:]


def shares(watches: list[Stopwatch]) -> dict[str, float]:
    """Each stage's part of all the time."""
    total = sum(watch.total for watch in watches)
    return {stage: sum(watch.seconds[stage] for watch in watches) / total for stage in STAGES}


def main() -> None:
    gc.set_threshold(GC_THRESHOLD)
    spreads, stages = {}, {}
    for case in STEP_CASES:
        watches = measure(case)
        spreads[case.name] = Spread.of([watch.total / case.blocks * 1e6 for watch in watches])
        stages[case.name] = shares(watches)
        note(f"{case.name}: {spreads[case.name]} us/block")
    peer = "prepare + complete + take_events, + encode"
    report_steps(
        "sidecar_step",
        spreads,
        TARGET_US,
        PEER_STAGES,
        peer,
        shares=stages,
    )


if __name__ == "__main__":
    main()
