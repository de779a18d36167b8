"""The host arena: the bytes of the CPU tier, one slot a block. Anonymous memory, so it dies with the process."""

from __future__ import annotations

import mmap

import torch

from kvevents_service.errors import ConfigError


class HostArena:
    """Memory for `slots` blocks. A slot holds a block's regions one after another."""

    def __init__(self, slots: int, block_bytes: int) -> None:
        self.slots = slots
        self.block_bytes = block_bytes
        try:
            self._map = mmap.mmap(-1, slots * block_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise ConfigError("host_bytes", f"an amount this machine can map ({error.strerror})") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)

    def view(self, dtype: torch.dtype) -> torch.Tensor:
        """The arena as a tensor [slots, block_bytes / itemsize]; block_bytes is a multiple of the item size."""
        return torch.frombuffer(self._map, dtype=dtype).view(self.slots, -1)

    def __repr__(self) -> str:
        return f"<HostArena {self.slots} slots of {self.block_bytes} bytes>"
