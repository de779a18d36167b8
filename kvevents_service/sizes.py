"""Sizes as people write them: `8GiB`, `1.5TB`, and Kubernetes' `8Gi`. A bare `G` could be either: it is refused."""

from __future__ import annotations

import re
from typing import Final

_BINARY: Final = {letter: 1 << 10 * power for power, letter in enumerate("KMGT", 1)}
_UNITS: Final = {
    "B": 1,
    **{f"{letter}{end}": size for letter, size in _BINARY.items() for end in ("i", "iB")},
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
    "kB": 1000,
}
_SIZE: Final = re.compile(r"(\d{1,15}(?:\.\d{1,6})?) ?([A-Za-z]{1,3})", re.ASCII)

EXPECTED: Final = "a whole number of bytes, or a size like 8GiB"


def parse_size(text: str) -> int | None:
    """Bytes of a number with a unit; None for what is no such size, or no whole number of bytes."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or found[2] not in _UNITS:
        return None
    whole, _, fraction = found[1].partition(".")
    scaled = int(whole + fraction) * _UNITS[found[2]]
    size, rest = divmod(scaled, 10 ** len(fraction))
    return None if rest else size


def size_text(size_bytes: float) -> str:
    """A size for people: `8 GiB`, `1.5 MiB`, `17 B`."""
    for letter, unit in reversed(_BINARY.items()):
        if abs(size_bytes) >= unit:
            return f"{size_bytes / unit:.4g} {letter}iB"
    return f"{size_bytes:.4g} B"
