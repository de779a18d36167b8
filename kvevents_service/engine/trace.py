"""Production traffic as requests: a Mooncake trace line becomes token ids and a chain of block hashes.

The trace has one id for each 512-token block (data/README.md). Token ids are derived from the block id by a fixed
function, so that equal prefixes have equal tokens and equal hashes, in every process.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from pathlib import Path

import msgspec

TRACE_BLOCK_TOKENS = 512
VOCABULARY = 128_000


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


def chain_hashes(tokens: array[int], block_size: int, previous: list[bytes], root: bytes = b"") -> list[bytes]:
    """Hashes of the full blocks of `tokens` after those in `previous`: sha256(parent hash + token bytes).

    `root` stands before the first block: an adapter or a salt makes another chain of the same tokens.
    """
    hashes = []
    parent = previous[-1] if previous else root
    for start in range(len(previous) * block_size, len(tokens) - block_size + 1, block_size):
        parent = hashlib.sha256(parent + tokens[start : start + block_size].tobytes()).digest()
        hashes.append(parent)
    return hashes
