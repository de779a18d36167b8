"""The forms of a block hash on the wire, each made from the engine's digest (8 to 64 bytes).

A form is applied alike to the blocks of a store, to its parent and to removals, so that they meet again.
"""

from __future__ import annotations

import sys
from array import array
from enum import Enum
from typing import Final

from kvevents_service.wire.events import BlockHash

WORD_BYTES: Final = 8
NARROW_MIN: Final = 1 << 32
NARROW_LIMIT: Final = 1 << 63
_NARROW_LIFT: Final = 1 << 62
_LITTLE: Final = sys.byteorder == "little"


class HashForm(Enum):
    """Which bytes of the digest, and as what. Words are read big endian; the value is its text for people.

    DIGEST: all bytes (vLLM with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0).
    LOW64: the last 8 bytes, unsigned (vLLM's default).
    LOW64_SIGNED: the same bits, signed (SGLang).
    HIGH64_SIGNED: the first 8 bytes, signed (what AIBrix makes of a whole digest).
    NARROW: the low 63 bits; where that is below 2^32, bit 62 is set. In [2^32, 2^63), so never 0.
    """

    DIGEST = "all bytes"
    LOW64 = "low 64, unsigned"
    LOW64_SIGNED = "low 64, signed"
    HIGH64_SIGNED = "high 64, signed"
    NARROW = "low 63, >= 2^32"


_SIGNED: Final = (HashForm.LOW64_SIGNED, HashForm.HIGH64_SIGNED)  # no set: the hash of an enum is slow


def hashes_in(form: HashForm, packed: bytes, hash_bytes: int) -> list[BlockHash]:
    """Every hash of n packed digests of `hash_bytes` bytes each, in order."""
    if len(packed) == hash_bytes:
        return [hash_in(form, packed)]
    if form is HashForm.DIGEST or hash_bytes % WORD_BYTES:
        digests = (packed[start : start + hash_bytes] for start in range(0, len(packed), hash_bytes))
        return [hash_in(form, digest) for digest in digests]
    step = hash_bytes // WORD_BYTES
    words = array("q" if form in _SIGNED else "Q", packed)
    words = words[0 if form is HashForm.HIGH64_SIGNED else step - 1 :: step]
    if _LITTLE:
        words.byteswap()
    return [*map(_narrow, words)] if form is HashForm.NARROW else words.tolist()  # type: ignore[return-value]


def hash_in(form: HashForm, digest: bytes) -> BlockHash:
    """One hash."""
    if form is HashForm.DIGEST:
        return digest
    word = digest[:WORD_BYTES] if form is HashForm.HIGH64_SIGNED else digest[-WORD_BYTES:]
    value = int.from_bytes(word, "big", signed=form in _SIGNED)
    return _narrow(value) if form is HashForm.NARROW else value


def _narrow(word: int) -> int:
    value = word & (NARROW_LIMIT - 1)
    return value if value >= NARROW_MIN else value | _NARROW_LIFT
