"""A rank's KV cache made readable for the sidecar, without moving it out of the engine's hands.

On the CPU platform a storage moves into POSIX shared memory in place: every view of it follows, and its descriptor
goes to the sidecar. A device says with its own entry in `SHARERS` how its memory is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvevents_service.engine.vllm_layout import Place
from kvevents_service.errors import ConfigError
from kvevents_service.wire.control import Memory, Region


class Shared(NamedTuple):
    """One storage: how the hello names it, and a descriptor if one goes along. The storage keeps it open."""

    memory: Memory
    fds: tuple[int, ...] = ()


def share_in_place(storage: Any) -> Shared:
    """CPU memory. ConfigError if there is no room for it in /dev/shm."""
    try:
        storage.share_memory_()
        fd, size = storage._share_fd_cpu_()  # as torch.multiprocessing does it
    except RuntimeError as error:
        expected = f"{storage.nbytes()} bytes of room for the KV cache (docker: --shm-size). {error}"
        raise ConfigError("/dev/shm", expected) from error
    return Shared(Memory(size), (fd,))


SHARERS: dict[str, Callable[[Any], Shared]] = {"cpu": share_in_place}
"""By torch's name for the type of device."""


class RankMemory(NamedTuple):
    """What a rank's hello says of its memory."""

    memories: list[Memory]
    regions: list[Region]
    fds: list[int]


def share(places: Sequence[Place]) -> RankMemory:
    """Share every storage once. ConfigError for a device whose memory cannot be shared."""
    numbers: dict[int, int] = {}
    shared = RankMemory([], [], [])
    for place in places:
        number = numbers.get(place.storage._cdata)
        if number is None:
            number = numbers[place.storage._cdata] = len(numbers)
            memory, fds = _sharer(place.storage)(place.storage)
            shared.memories.append(memory)
            shared.fds.extend(fds)
        shared.regions.append(place.region(number))
    return shared


def _sharer(storage: Any) -> Callable[[Any], Shared]:
    device = storage.device.type
    if device not in SHARERS:
        raise ConfigError("device", f"one of {', '.join(SHARERS)}, not {device}")
    return SHARERS[device]
