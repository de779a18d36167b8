"""A device's node is read as the system tells it; memory may be asked of a node, and the asking may fail."""

import ctypes
import mmap
from pathlib import Path

import pytest

from kvevents_service.transfer.placement import node_of, prefer_node

NODE_0 = Path("/sys/devices/system/node/node0")


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", None), ("what", None), ("4096", None)])
def test_the_node_of_a_device(tmp_path: Path, text: str, node: int | None) -> None:
    device = tmp_path / "0000:0a:00.0"
    device.mkdir()
    (device / "numa_node").write_text(text)
    assert node_of("0000:0A:00.0", tmp_path) == node


def test_a_device_that_is_not_there_has_no_node(tmp_path: Path) -> None:
    assert node_of("0000:0a:00.0", tmp_path) is None


def policies(address: int) -> list[str]:
    """What the kernel says of the mapping that starts here."""
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    return [line.split()[1] for line in lines if int(line.split()[0], 16) == address]


@pytest.mark.skipif(not NODE_0.exists() or not Path("/proc/self/numa_maps").exists(), reason="no NUMA here")
def test_pages_are_asked_of_a_node_that_is_there_and_of_no_other() -> None:
    size = 1 << 20
    mapping = mmap.mmap(-1, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    assert not prefer_node(address, size, 1023)
    if not prefer_node(address, size, 0):
        pytest.skip("mbind is not allowed here")
    assert policies(address) in (["prefer:0"], ["prefer=relative:0"], ["prefer"])
