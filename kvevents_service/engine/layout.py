"""An engine's KV memory, made for sharing: an unnamed, sealed memfd that the sidecar maps by descriptor.

Nothing appears in /dev/shm, so a kill -9 of either side leaves nothing behind.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import NamedTuple

from kvevents_service.wire.control import GroupSpec, Memory, Region


class SharedMemory(NamedTuple):
    """Memory of this process that another one can map by its descriptor."""

    fd: int
    map: mmap.mmap

    @classmethod
    def create(cls, size_bytes: int, name: str = "kvevents-kv") -> SharedMemory:
        """Zeroed memory. It can neither shrink nor grow: a peer's mapping never faults."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return cls(fd, mmap.mmap(fd, size_bytes))


class EngineLayout(NamedTuple):
    """What an engine tells the sidecar about itself.

    `namespace` must differ whenever KV bytes of equal hashes would differ: model, revision, dtype, layout.
    `events` are handles of CUDA events that `OffloadClient.mark` tells of (`engine.cuda.ComputeEvents`).
    `fds` holds one descriptor for each memory without a shm_name, in order; the client never closes them.
    With several `ranks`, memories and regions stay empty: each rank's `RankClient` brings its own. `engine_id` is
    then a name that no other run of an engine has. Without groups it is no engine, but an observer.
    """

    engine_id: str
    namespace: str
    groups: Sequence[GroupSpec]
    memories: Sequence[Memory] = ()
    regions: Sequence[Region] = ()
    fds: Sequence[int] = ()
    hash_bytes: int = 32
    hash_tokens: int = 0
    ranks: int = 1
    events: Sequence[bytes] = ()


def uniform_layers(layers: int, blocks: int, block_bytes: int) -> list[Region]:
    """Regions of `layers` equal layers laid one after another in memory 0."""
    layer_bytes = blocks * block_bytes
    return [
        Region(f"layer.{layer}", 0, layer * layer_bytes, block_bytes, block_bytes, blocks)
        for layer in range(layers)
    ]
