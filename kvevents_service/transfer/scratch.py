"""Memory that stands where an engine's would, for a copy whose bytes nobody wants."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

from kvevents_service.transfer.memory import EngineMemory
from kvevents_service.wire.control import Region


def scratch_memory(block_sizes: Sequence[int]) -> EngineMemory:
    """One block of one region for each size. `close` it when no copy touches it."""
    starts = [sum(block_sizes[:place]) for place in range(len(block_sizes))]
    regions = [
        Region(f"scratch{place}", 0, start, size, size, 1)
        for place, (start, size) in enumerate(zip(starts, block_sizes, strict=True))
    ]
    return EngineMemory([mmap.mmap(-1, sum(block_sizes))], regions)
