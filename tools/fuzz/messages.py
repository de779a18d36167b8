"""Good messages of every kind an engine may send, in the layout of the engine that runs beside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import msgspec

from kvevents_service.engine.layout import uniform_layers
from kvevents_service.wire.control import (
    PROTOCOL_VERSION,
    ClientMessage,
    GroupSpec,
    Hello,
    InnerHash,
    Inspect,
    Load,
    Lookup,
    Mark,
    Memory,
    Offer,
    Release,
    Reset,
    Step,
)
from kvevents_service.wire.packing import pack_int32

BLOCK_SIZE, BLOCKS, LAYERS, LAYER_BYTES, HASH_BYTES = 16, 64, 2, 64, 32
MEMORY_BYTES = BLOCKS * LAYERS * LAYER_BYTES
NAMESPACE = "fuzz"
GROUP = GroupSpec(0, "full_attention", BLOCK_SIZE)
NAMES = 64
"""So few hashes are offered that what is offered is there already, now and then, or is a parent."""


def hello(engine_id: str = "fuzz", role: str = "engine") -> Hello:
    return Hello(
        PROTOCOL_VERSION,
        role,
        engine_id,
        NAMESPACE,
        HASH_BYTES,
        [GROUP],
        [Memory(MEMORY_BYTES)],
        uniform_layers(LAYERS, BLOCKS, LAYER_BYTES),
    )


def name(number: int) -> bytes:
    return b"fuzz" + number.to_bytes(HASH_BYTES - 4, "big")


class Keys:
    """Readers know a block by the last 8 bytes of its hash. Changed hashes can agree in those, real ones do not."""

    def __init__(self) -> None:
        self._hashes: dict[bytes, bytes] = {}

    def __repr__(self) -> str:
        return f"<Keys of {len(self._hashes)} hashes>"

    def agree(self, step: Step) -> bool:
        """False if another hash than before has one of these keys."""
        return all(self._hashes.setdefault(one[-8:], one) == one for one in _hashes(step))


def _hashes(step: Step) -> Iterator[bytes]:
    for offer in step.offers:
        packed = offer.block_hashes
        yield from (packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES))
        yield from (inner.block_hash for inner in offer.inner or ())


class Messages:
    """Makes them at random. Ids rise, as those of an engine do."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._id = 0
        kinds: dict[Callable[[], ClientMessage], float] = {
            self.step: 40, self.lookup: 20, self.load: 12, self.release: 6, self.inspect: 8, self.mark: 6,
            self.reset: 0.05, self.hello: 3,
        }  # fmt: skip
        self._kinds, self._weights = [*kinds], [*kinds.values()]

    def any(self) -> ClientMessage:
        return self._random.choices(self._kinds, self._weights)[0]()

    def _next_id(self) -> int:
        self._id += 1
        return self._id

    def step(self) -> Step:
        offers = [self.offer() for _ in range(self._random.choice((1, 1, 2, 3)))]
        return Step(self._next_id(), offers, ["r"] * self._random.randrange(2), [])

    def offer(self) -> Offer:
        random, count = self._random, self._random.choice((1, 2, 4))
        first = random.randrange(NAMES)
        hashes = [name((first + i) % NAMES) for i in range(count)]
        tokens = pack_int32([random.randrange(1000)] * (count * BLOCK_SIZE))
        ids = pack_int32([random.randrange(BLOCKS) for _ in range(count)])
        made = Offer("r", 0, b"".join(hashes), tokens, ids, name(first - 1) if first else None)
        return self._dressed(made) if random.randrange(4) == 0 else made

    def _dressed(self, offer: Offer) -> Offer:
        """With everything that an offer may have besides."""
        count = len(offer.block_hashes) // HASH_BYTES
        inner = [InnerHash(0, 1, name(NAMES + 1), offer.parent)]
        keys: list[tuple[object, ...] | None] = [("lora", 1)] * count
        return msgspec.structs.replace(offer, lora_id=1, lora_name="adapter", extra_keys=keys, inner=inner)

    def lookup(self) -> Lookup:
        random, first = self._random, self._random.randrange(NAMES)
        hashes = b"".join(name((first + i) % NAMES) for i in range(random.choice((1, 4, 16))))
        return Lookup(
            self._next_id(), "r", hashes, 1.0, random.choice((0, BLOCK_SIZE)), random.choice((True, False))
        )

    def load(self) -> Load:
        random = self._random
        ids = pack_int32([random.randrange(BLOCKS) for _ in range(random.choice((1, 2, 4)))])
        return Load(self._next_id(), "r", random.randrange(1, 200), ids, random.choice((None, 1, 2)))

    def release(self) -> Release:
        return Release(self._random.randrange(1, 200))

    def reset(self) -> Reset:
        return Reset(self._next_id())

    def inspect(self) -> Inspect:
        return Inspect(self._next_id(), self._random.randrange(8) == 0)

    def mark(self) -> Mark:
        return Mark(self._random.randrange(100))

    def hello(self) -> Hello:
        return hello()
