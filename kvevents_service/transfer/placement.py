"""Which node of a machine with several memories an arena's pages come from."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

PCI_DEVICES = Path("/sys/bus/pci/devices")
_MBIND = {"x86_64": 237, "aarch64": 235}
_PREFERRED = 1
_MASK_BITS = 1024
"""The kernel wants to be told one more."""


def node_of(pci_address: str, devices: Path = PCI_DEVICES) -> int | None:
    """The node that a device is attached to; None if the system does not say."""
    try:
        node = int((devices / pci_address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if 0 <= node < _MASK_BITS else None


def prefer_node(address: int, size_bytes: int, node: int) -> bool:
    """Take pages of this range that were never touched from this node, as long as it has any (mbind).

    False: the system does not do that. The range starts at a page.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        return False
    mask = (ctypes.c_ulong * (_MASK_BITS // (8 * ctypes.sizeof(ctypes.c_ulong))))()
    word, bit = divmod(node, 8 * ctypes.sizeof(ctypes.c_ulong))
    mask[word] = 1 << bit
    arguments = (
        ctypes.c_void_p(address),
        ctypes.c_ulong(size_bytes),
        _PREFERRED,
        mask,
        ctypes.c_ulong(_MASK_BITS + 1),
        0,
    )
    done: int = ctypes.CDLL(None).syscall(ctypes.c_long(number), *arguments)
    return done == 0
