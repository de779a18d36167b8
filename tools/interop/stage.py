"""Where a scenario plays: a sidecar, a feeder, consumers that join when the scenario says so, and the check."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import zmq
from consumer import BLOCK_SIZE, Answer, Consumer, Endpoints, Kind
from feeder import BLOCKS, Feeder
from lossy import LossyNetwork
from sidecar import Sidecar
from tiers import TierPublisher
from truth import Held

from kvevents_service.settings import load_config
from kvevents_service.testing import Chain, make_chain

SEED = 7
ASKED = 64
STEP_BLOCKS = BLOCKS
CHECK_S = 15.0
STEADY_S = 1.0
POLL_S = 0.2
JOIN_S = 10.0


class Line(NamedTuple):
    """One line of the report."""

    consumer: str
    real: bool
    scenario: str
    ok: bool
    detail: str


class Joined(NamedTuple):
    """A consumer that has subscribed, and how it got on."""

    kind: Kind
    consumer: Consumer
    network: LossyNetwork


class Stage:
    """One scenario's sidecar, prompts and consumers."""

    block_size = BLOCK_SIZE

    def __init__(
        self,
        directory: Path,
        kinds: Sequence[Kind],
        *,
        blocks: int = 64,
        retained: int = 10_000,
        check_s: float = CHECK_S,
    ) -> None:
        self.directory = directory
        self.kinds = kinds
        self._check_s = check_s
        topics = {kind.dialect: kind.topic for kind in kinds}
        self.sidecar = Sidecar(directory, topics, blocks=blocks, retained=retained)
        self._random = Random(SEED)
        self.prompts: list[Chain] = []
        self.joined: list[Joined] = []
        self.failed: dict[str, str] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._feeder: Feeder | None = None
        self._tiers: TierPublisher | None = None

    @property
    def feeder(self) -> Feeder:
        if self._feeder is None:
            self._feeder = Feeder(self.sidecar.engine_socket)
        return self._feeder

    @property
    def tiers(self) -> TierPublisher:
        """In the sidecar's place, with its settings."""
        if self._tiers is None:
            self._tiers = TierPublisher(load_config(self.sidecar.config, {}))
        return self._tiers

    def new_prompt(self, blocks: int, *, asked: bool = True) -> Chain:
        """Blocks of random tokens. No two prompts share one. asked: `check` asks for it from now on."""
        tokens = [self._random.randrange(1, 100_000) for _ in range(blocks * BLOCK_SIZE)]
        prompt = make_chain(tokens, BLOCK_SIZE)
        if asked:
            self.prompts.append(prompt)
        return prompt

    def feed(self, prompts: int, blocks: int = 6) -> None:
        """Store new prompts, one step and so one batch each."""
        for _ in range(prompts):
            self.feeder.store(self.new_prompt(blocks))

    def fill(self, blocks: int) -> None:
        """Store so many blocks in full steps. ASKED of the prompts, spread over them all, are asked for."""
        steps = blocks // STEP_BLOCKS
        for step in range(steps):
            rest = [self.new_prompt(8, asked=False) for _ in range(STEP_BLOCKS // 8 - 1)]
            asked = step % max(1, steps // ASKED) == 0
            self.feeder.store(self.new_prompt(8, asked=asked), *rest)

    def join(self) -> None:
        """Every consumer starts and subscribes. One that cannot is not ok; the others go on."""
        for kind in self.kinds:
            network = LossyNetwork(self._context, self.sidecar.outputs[kind.dialect].pub)
            endpoints = Endpoints(network.endpoint, self.sidecar.outputs[kind.dialect].replay, self.block_size)
            try:
                consumer = kind.start(endpoints, self.directory)
            except (OSError, RuntimeError) as error:
                self.failed[kind.name] = f"did not start: {error}"
                network.close()
            else:
                self.joined.append(Joined(kind, consumer, network))
        self._await_subscriptions()

    def _await_subscriptions(self) -> None:
        for joined in self.joined:
            if not joined.network.subscribed.wait(JOIN_S):
                self.failed[joined.kind.name] = "did not subscribe"
        time.sleep(STEADY_S)  # the subscription goes on from the network to the publisher

    def lose(self, losing: bool) -> None:
        """Every message to every consumer is lost from now on, or none is."""
        for joined in self.joined:
            joined.network.lose(losing)

    # the check

    def check(self) -> dict[str, str]:
        """Ask every consumer for every prompt until all answers are right and stay right, or for too long.

        Returns what is wrong at the end, by consumer.
        """
        held = self.held()
        deadline, right_since = time.monotonic() + self._check_s, None
        while True:
            wrong = self._compare_all(held)
            now = time.monotonic()
            right_since = None if any(wrong.values()) else right_since or now
            steady = right_since is not None and now - right_since >= STEADY_S
            if steady or (now > deadline and right_since is None):
                return wrong
            time.sleep(POLL_S)

    def held(self) -> Held:
        """What is resident."""
        return self.feeder.held() if self._tiers is None else self._tiers.held()

    def _compare_all(self, held: Held) -> dict[str, str]:
        wrong: dict[str, str] = {}
        for joined in self.joined:
            name = joined.kind.name
            wrong[name] = wrong.get(name) or self._compare(joined.consumer, held)
        return wrong

    def _compare(self, consumer: Consumer, held: Held) -> str:
        wrong: list[tuple[int, Answer, Answer]] = []
        for number, prompt in enumerate(self.prompts):
            try:
                said = consumer.ask(prompt)
            except (OSError, RuntimeError, KeyError) as error:
                return f"no answer: {error!r}"
            expected = consumer.expect(prompt, held)
            if said != expected:
                wrong.append((number, said, expected))
        if not wrong:
            return ""
        number, said, expected = wrong[0]
        first = f"prompt {number}: {said}, not {expected}"
        return f"{len(wrong)} of {len(self.prompts)} prompts differ, {first}; {consumer.note()}"

    def close(self) -> None:
        for joined in self.joined:
            joined.consumer.close()
            joined.network.close()
        if self._feeder is not None:
            self._feeder.close()
        if self._tiers is not None:
            self._tiers.close()
        self.sidecar.stop()
        self._context.destroy(linger=0)
