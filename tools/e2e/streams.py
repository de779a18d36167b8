"""Event streams, asked for from their first number, and what they fold to."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import zmq

from kvevents_service.wire.codec import decode_batch
from kvevents_service.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Event

REPLAY_S = 10.0
END = (-1).to_bytes(8, "big", signed=True)


class Block(NamedTuple):
    """All that routers are told of one block."""

    tokens: tuple[int, ...]
    parent: str | None
    block_size: int
    lora_name: str | None
    extra_keys: Any
    kind: str | None


Key = tuple[str, int, str]
"""Medium, group, and the low 64 bits of the hash."""


def replayed(endpoint: str) -> list[Event]:
    """Every event of a publisher, from number 0. RuntimeError if it does not answer."""
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.linger = 0
    dealer.rcvtimeo = int(REPLAY_S * 1000)
    try:
        dealer.connect(endpoint)
        dealer.send_multipart([b"", (0).to_bytes(8, "big")])
        return list(_batches(dealer))
    except zmq.Again as error:
        raise RuntimeError(f"no replay at {endpoint}") from error
    finally:
        dealer.close()


def _batches(dealer: zmq.Socket[bytes]) -> Iterator[Event]:
    deadline = time.monotonic() + REPLAY_S
    while time.monotonic() < deadline:
        *_, number, payload = dealer.recv_multipart()
        if number == END:
            return
        yield from decode_batch(payload).batch.events
    raise RuntimeError("a replay without an end")


def fold(events: Iterable[Event]) -> dict[Key, Block]:
    """What is resident behind the last event."""
    resident: dict[Key, Block] = {}
    for event in events:
        match event:
            case BlockStored():
                resident.update(_blocks(event))
            case BlockRemoved():
                for block_hash in event.block_hashes:
                    resident.pop((event.medium or "GPU", event.group_idx or 0, hex64(block_hash)), None)
            case AllBlocksCleared():
                resident.clear()
    return resident


def _blocks(event: BlockStored) -> Iterator[tuple[Key, Block]]:
    parent = None if event.parent_block_hash is None else hex64(event.parent_block_hash)
    keys = event.extra_keys or [None] * len(event.block_hashes)
    for place, block_hash in enumerate(event.block_hashes):
        tokens = event.token_ids[place * event.block_size : (place + 1) * event.block_size]
        name = hex64(block_hash)
        said = (event.block_size, event.lora_name, keys[place], event.kv_cache_spec_kind)
        yield (event.medium or "GPU", event.group_idx or 0, name), Block(tuple(tokens), parent, *said)
        parent = name


def hex64(block_hash: int | bytes) -> str:
    if isinstance(block_hash, bytes):
        return block_hash[-8:].hex()
    return f"{block_hash % 2**64:016x}"


def prefix_tokens(resident: dict[Key, Block], medium: str, prompt: list[int]) -> int:
    """How much of a prompt is held in a medium, block by block from its start."""
    places = {(block.parent, block.tokens): (key[2], block) for key, block in resident.items() if key[0] == medium}
    parent, tokens = None, 0
    while True:
        size = next((block.block_size for _, block in places.values()), 1)
        found = places.get((parent, tuple(prompt[tokens : tokens + size])))
        if found is None:
            return tokens
        parent, tokens = found[0], tokens + size
