"""Production traffic as requests: a Mooncake trace line becomes token ids and a chain of block hashes.

The trace has one id for each 512-token block (data/README.md). Token ids are derived from the block id by a fixed
function, so that equal prefixes have equal tokens and equal hashes, in every process.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from itertools import repeat
from pathlib import Path

import msgspec

from kvevents_service.engine.identity import PLAIN, Identity, KeyWalk, MediaItem

TRACE_BLOCK_TOKENS = 512
VOCABULARY = 128_000
PLACEHOLDER = VOCABULARY


class TraceLine(msgspec.Struct, frozen=True):
    """One request of the trace: lengths in tokens, `timestamp` in milliseconds."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(path: Path) -> Iterator[TraceLine]:
    """The requests of a trace file, in order. msgspec.DecodeError names what is wrong with a line."""
    with path.open("rb") as lines:
        for line in lines:
            yield msgspec.json.decode(line, type=TraceLine)


def derived_tokens(seed: int, count: int) -> array[int]:
    """`count` token ids that depend on the seed alone (splitmix-like, one multiplication a token)."""
    start = (seed * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & 0xFFFFFFFFFFFFFFFF
    return array("i", [((start + i * 0xBF58476D1CE4E5B9) >> 24) % VOCABULARY for i in range(count)])


def prompt_tokens(line: TraceLine) -> array[int]:
    """The prompt's token ids."""
    tokens = array("i")
    for block_id in line.hash_ids:
        tokens += derived_tokens(block_id, TRACE_BLOCK_TOKENS)
    return tokens[: line.input_length]


def show_images(tokens: array[int], media: Sequence[MediaItem]) -> None:
    """Put the placeholder where an image is: its tokens say nothing of what it shows."""
    for item in media:
        tokens[item.offset : item.end] = array("i", [PLACEHOLDER]) * item.length


def chain_hashes(
    tokens: array[int], block_size: int, previous: list[bytes], identity: Identity = PLAIN
) -> list[bytes]:
    """Hashes of the full blocks of `tokens` after those in `previous`: sha256(parent hash + tokens + extra keys).

    So an adapter, a salt or another image makes another chain of the same tokens, from the first block on that it
    touches.
    """
    hashes: list[bytes] = []
    first, stop = len(previous), len(tokens) // block_size
    keys = KeyWalk(identity, block_size).keys(first, stop) or repeat(None)
    parent = previous[-1] if previous else b""
    for block, key in zip(range(first, stop), keys, strict=False):
        content = tokens[block * block_size : (block + 1) * block_size].tobytes()
        parent = hashlib.sha256(parent + content + (repr(key).encode() if key else b"")).digest()
        hashes.append(parent)
    return hashes
