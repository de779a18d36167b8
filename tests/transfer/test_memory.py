"""Engine memory is mapped as announced or refused by name; descriptors are closed and names unlinked either way."""

import os
from pathlib import Path

import pytest
import torch

from kvevents_service.engine.layout import SharedMemory
from kvevents_service.errors import ControlError
from kvevents_service.transfer.memory import attach
from kvevents_service.wire.control import Memory, Region

REGION = Region("l", 0, 0, 64, 64, 4)


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_a_descriptor_is_mapped_and_closed() -> None:
    shared = SharedMemory.create(256)
    shared.map[:3] = b"abc"
    memory = attach([Memory(256)], [REGION], [os.dup(shared.fd)])
    assert (memory.blocks, memory.block_bytes, memory.dtype) == (4, 64, torch.int64)
    shared.map[64:67] = b"xyz"
    assert memory.views[0][1].view(torch.uint8)[:3].tolist() == list(b"xyz")
    memory.close()
    os.close(shared.fd)


@pytest.mark.parametrize(
    ("memories", "regions", "field"),
    [
        ([Memory(257)], [REGION], "size_bytes"),
        ([Memory(256), Memory(256)], [REGION], "memories"),
        ([Memory(128)], [REGION], "regions[0]"),
        ([Memory(256)], [Region("l", 0, 0, 0, 64, 4)], "regions[0]"),
        ([Memory(256)], [Region("l", -1, 0, 64, 64, 4)], "regions[0].memory"),
        ([], [], "regions"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaks_no_descriptor(
    memories: list[Memory], regions: list[Region], field: str
) -> None:
    shared = SharedMemory.create(256)
    before = open_fds()
    with pytest.raises(ControlError) as refused:
        attach(memories, regions, [os.dup(shared.fd)])
    assert refused.value.field == field
    assert open_fds() <= before
    os.close(shared.fd)


def test_a_name_is_unlinked_once_mapped() -> None:
    path = Path("/dev/shm", f"kvevents-test-memory-{os.getpid()}")
    path.write_bytes(bytes(256))
    attach([Memory(256, path.name)], [REGION], []).close()
    assert not path.exists()


def test_a_named_object_that_has_no_room_is_refused_before_it_is_touched() -> None:
    whole = os.statvfs("/dev/shm")
    size = whole.f_blocks * whole.f_frsize + (1 << 30)
    path = Path("/dev/shm", f"kvevents-test-room-{os.getpid()}")
    with path.open("wb") as sparse:
        sparse.truncate(size)
    try:
        with pytest.raises(ControlError, match="room for it in /dev/shm"):
            attach([Memory(size, path.name)], [REGION], [])
    finally:
        path.unlink()


def test_a_name_never_follows_a_link(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(bytes(256))
    link = Path("/dev/shm", f"kvevents-test-link-{os.getpid()}")
    link.symlink_to(target)
    try:
        with pytest.raises(ControlError, match="shm_name"):
            attach([Memory(256, link.name)], [REGION], [])
    finally:
        link.unlink()


def test_memory_for_engines_can_neither_shrink_nor_grow() -> None:
    shared = SharedMemory.create(4096)
    for size in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(shared.fd, size)
    os.close(shared.fd)
