"""What a consumer should answer: computed from prompts whose hashes we know and from what is resident."""

from __future__ import annotations

from typing import NamedTuple

from kvevents_service.testing import Chain

NAME_BYTES = 8
"""Residents are compared by the last bytes of their hash, which every dialect's hashes are made from."""

Held = dict[str, frozenset[bytes]]
"""Medium -> names of the blocks resident there."""


class Reach(NamedTuple):
    """How many tokens of one prompt are held: from the start on GPU, and from there on one tier below."""

    gpu: int
    then_cpu: int
    then_storage: int
    cpu_then_storage: int


def reach(chain: Chain, held: Held) -> Reach:
    gpu = _run(chain, held, "GPU", 0)
    cpu = _run(chain, held, "CPU", gpu)
    sizes = (gpu, cpu, _run(chain, held, "STORAGE", gpu), _run(chain, held, "STORAGE", gpu + cpu))
    return Reach(*(blocks * chain.block_size for blocks in sizes))


def _run(chain: Chain, held: Held, medium: str, start: int) -> int:
    """How many blocks in a row from block `start` are held there."""
    names = held.get(medium, frozenset())
    length = 0
    for block_hash in chain.hashes[start:]:
        if block_hash[-NAME_BYTES:] not in names:
            break
        length += 1
    return length
