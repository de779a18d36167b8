"""What a consumer should answer: computed from prompts whose hashes we know and from what is resident."""

from __future__ import annotations

from kvevents_service.testing import Chain

NAME_BYTES = 8
"""Residents are compared by the last bytes of their hash."""

Held = dict[str, frozenset[bytes]]
"""Medium -> names of the blocks resident there."""


def run(chain: Chain, held: Held, *media: str, start: int = 0) -> int:
    """How many tokens in a row, from token `start` on, are in blocks that are held on any of these media."""
    names = frozenset[bytes]().union(*(held.get(medium, frozenset()) for medium in media))
    length = 0
    for block_hash in chain.hashes[start // chain.block_size :]:
        if block_hash[-NAME_BYTES:] not in names:
            break
        length += chain.block_size
    return length
