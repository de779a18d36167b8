"""A store of a source's stream, checked and packed: what the relay remembers of it.

A hash keeps its bytes: the digest as it came, or 8 bytes, big endian, of an int of either sign. Every form in
`wire.hashes` of these bytes is the value that a router makes of the source's own, which is read by `keys64` here:
stores, parents and removals meet by their low 64 bits, however each is written.
"""

from __future__ import annotations

import sys
from array import array
from struct import Struct
from struct import error as StructError
from typing import Final

from kvevents_service.core.block_keys import packed
from kvevents_service.core.metadata import BlockStoreMeta
from kvevents_service.core.residency import keys64
from kvevents_service.core.source_groups import StoreKind
from kvevents_service.wire.events import BlockHash, BlockStored
from kvevents_service.wire.extra_keys import is_deep
from kvevents_service.wire.hashes import WORD_BYTES

MAX_HASH_BYTES: Final = 64
_FEW: Final = tuple(Struct(f">{count}Q") for count in range(65))
_LITTLE: Final = sys.byteorder == "little"


def stored(event: BlockStored, kind: StoreKind) -> tuple[BlockStoreMeta, list[int]] | None:
    """The run of a store, and what each block is found by; None for what cannot be described (I7): nothing is
    announced of it then."""
    hashes, extra, before = event.block_hashes, event.extra_keys or None, event.parent_block_hash
    blocks = len(hashes)
    whole = blocks > 0 and event.block_size > 0 and len(event.token_ids) == blocks * event.block_size
    if not whole or (extra is not None and (len(extra) != blocks or is_deep(extra))):
        return None
    tokens, names = packed(event.token_ids), named(hashes)
    parent = None if before is None else named([before])
    if tokens is None or names is None or (parent is None) is not (before is None):
        return None
    hashed, keys = names
    meta = BlockStoreMeta(
        kind.group, kind.medium, len(hashed) // blocks, hashed, tokens,
        None if parent is None else parent[0], event.lora_id, event.lora_name,
        None if extra is None else _said(extra), kind.inner,
    )  # fmt: skip
    return meta, keys


def _said(extra_keys: list[object]) -> list[object] | None:
    """None where every block has nothing: what most streams say a block at a time."""
    return extra_keys if any(entry is not None for entry in extra_keys) else None


def named(hashes: list[BlockHash]) -> tuple[bytes, list[int]] | None:
    """Digests one after the other, all of one width, and the low 64 bits of each; None for one that is empty or too
    long.

    Digests of different widths are cut to their last 8 bytes, which is what is compared of them anyway.
    """
    try:
        return _packed_words(hashes), hashes  # type: ignore[arg-type, return-value]
    except (OverflowError, StructError, TypeError):  # signed ints, or bytes
        keys = keys64(hashes)
    widths = {len(name) if isinstance(name, bytes) else WORD_BYTES for name in hashes}
    if not 0 < min(widths) <= max(widths) <= MAX_HASH_BYTES:
        return None
    if len(widths) == 1 and min(widths) >= WORD_BYTES and all(isinstance(name, bytes) for name in hashes):
        return b"".join(hashes), keys  # type: ignore[arg-type]
    return _packed_words(keys), keys


def _packed_words(keys: list[int]) -> bytes:
    if len(keys) < len(_FEW):
        return _FEW[len(keys)].pack(*keys)
    words = array("Q", keys)
    if _LITTLE:
        words.byteswap()
    return words.tobytes()
