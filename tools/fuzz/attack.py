"""The attack, in a process of its own: so many bad inputs, dealt out to every socket, one round after the other.

    python -m tools.fuzz.attack --ready JSON --inputs 1000000 --seed 1 --seconds 480

The seed decides what is sent. Prints a line of counts now and then, and ends at the first fault.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from random import Random

import click
import msgspec

from tools.fuzz.engine_socket import EngineSocket, Fault
from tools.fuzz.tcp_sockets import RawSockets, Requests
from tools.proving.process import Ready

TELL_S = 2.0
CROWD_EVERY, CROWD = 64, 90
"""So many wait in the sidecar's handshakes and backlog together; one more would wait until those are over."""


class Told(msgspec.Struct):
    """How far it is. Every line but the last says `done: false`."""

    inputs: int
    counts: dict[str, int]
    fault: str = ""
    done: bool = False


class Attack:
    """Every way in, and its share of a round."""

    def __init__(self, ready: Ready, seed: int) -> None:
        random = Random(seed)
        self.engine = EngineSocket(ready.engine_socket, random)
        self.requests = Requests(ready.replay, ready.snapshot, random)
        self.raw = RawSockets([ready.pub, ready.replay, ready.snapshot], ready.admin, random)
        self.inputs = 0
        self._rounds = 0
        self._shares: list[tuple[Callable[[int], int], int]] = [
            (self.engine.session, 200),
            (self.engine.session, 200),
            (self.engine.greet, 12),
            (self.requests.replays, 24),
            (self.requests.snapshots, 4),
            (self.raw.subscriptions, 24),
            (self.raw.http, 4),
        ]

    def round(self) -> None:
        for give, share in self._shares:
            self.inputs += give(share)
        if self._rounds % CROWD_EVERY == 0:
            self.inputs += self.engine.crowd(CROWD)
        self._rounds += 1

    def counts(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for part in (self.engine, self.requests, self.raw):
            total.update(part.counts)
        return dict(sorted(total.items()))

    def close(self) -> None:
        self.engine.close()
        self.requests.close()


def tell(attack: Attack, fault: str = "", *, done: bool = False) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(Told(attack.inputs, attack.counts(), fault, done)) + b"\n")
    sys.stdout.buffer.flush()


@click.command()
@click.option("--ready", required=True, help="The sidecar's ready line.")
@click.option("--inputs", default=1_000_000)
@click.option("--seed", default=1)
@click.option("--seconds", default=480.0, help="It ends by then, with fewer.")
def main(ready: str, inputs: int, seed: int, seconds: float) -> None:
    attack, started = Attack(msgspec.json.decode(ready, type=Ready), seed), time.monotonic()
    told = started
    try:
        while attack.inputs < inputs and time.monotonic() < started + seconds:
            attack.round()
            if time.monotonic() > told + TELL_S:
                told = time.monotonic()
                tell(attack)
        tell(attack, done=True)
    except (Fault, OSError) as error:
        tell(attack, f"{type(error).__name__}: {error}", done=True)
    finally:
        attack.close()


if __name__ == "__main__":
    main()
