"""A store of a source's stream, checked and packed: what the relay remembers of it.

A hash keeps its bytes: the digest as it came, or 8 bytes, big endian, of an int of either sign. Every form in
`wire.hashes` of these bytes is the value that a router makes of the source's own, which is read by `key64` here:
stores, parents and removals meet by their low 64 bits, however each is written.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Final

from kvevents_service.core.block_keys import packed
from kvevents_service.core.metadata import BlockStoreMeta
from kvevents_service.core.residency import key64
from kvevents_service.wire.control import GroupSpec
from kvevents_service.wire.events import BlockHash, BlockStored
from kvevents_service.wire.hashes import WORD_BYTES

MAX_HASH_BYTES: Final = 64
_LITTLE: Final = sys.byteorder == "little"


def stored_meta(event: BlockStored, group: GroupSpec, medium: str, *, inner: bool) -> BlockStoreMeta | None:
    """The run of a store; None for what cannot be described (I7): nothing is announced of it then."""
    blocks, extra = len(event.block_hashes), event.extra_keys or None
    whole = blocks > 0 and event.block_size > 0 and len(event.token_ids) == blocks * event.block_size
    if not whole or (extra is not None and len(extra) != blocks):
        return None
    tokens, names = packed(event.token_ids), packed_hashes(event.block_hashes)
    before = event.parent_block_hash
    parent = None if before is None else packed_hashes([before])
    if tokens is None or names is None or (parent is None) is not (before is None):
        return None
    return BlockStoreMeta(
        group, medium, len(names) // blocks, names, tokens, parent, event.lora_id, event.lora_name,
        _said(extra), inner,
    )  # fmt: skip


def _said(extra_keys: list[object] | None) -> list[object] | None:
    """None where every block has nothing: what most streams say a block at a time."""
    return extra_keys if extra_keys and any(entry is not None for entry in extra_keys) else None


def packed_hashes(hashes: Sequence[BlockHash]) -> bytes | None:
    """Digests one after the other, all of one width; None for one that is empty or too long.

    Digests of different widths are cut to their last 8 bytes, which is what is compared of them anyway.
    """
    if all(type(name) is int for name in hashes):
        return _packed_words([key64(name) for name in hashes])
    widths = {len(name) if isinstance(name, bytes) else WORD_BYTES for name in hashes}
    if not 0 < min(widths) <= max(widths) <= MAX_HASH_BYTES:
        return None
    if len(widths) == 1 and min(widths) >= WORD_BYTES and all(isinstance(name, bytes) for name in hashes):
        return b"".join(hashes)  # type: ignore[arg-type]
    return _packed_words([key64(name) for name in hashes])


def _packed_words(keys: list[int]) -> bytes:
    words = array("Q", keys)
    if _LITTLE:
        words.byteswap()
    return words.tobytes()
