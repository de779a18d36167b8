"""By which names a server may be asked for: a page of another site, led here by a name of its own that says our
address (DNS rebinding), must not read what only this machine may see. A browser always tells the name.

An address is no such name, and `localhost` never leads elsewhere: they are always let in.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import ip_address
from typing import Final

_HEADER: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:/@\[\]]+)(:\d{0,5})?", re.ASCII)


class Hosts:
    """`in` says whether a Host header is let in. names: besides. every: no header is refused."""

    def __init__(self, names: Iterable[str] = (), *, every: bool = False) -> None:
        self._names = {"localhost", *map(_folded, names)}
        self._every = every

    def __repr__(self) -> str:
        return f"<Hosts {'any' if self._every else ', '.join(sorted(self._names))}>"

    def __contains__(self, header: object) -> bool:
        """header: as it came. An empty one is of no browser."""
        if self._every or header == b"":
            return True
        found = _HEADER.fullmatch(header.decode("ascii", "replace")) if isinstance(header, bytes) else None
        if found is None:
            return False
        name = _folded(found[1])
        return name in self._names or _is_address(name.strip("[]"))


def _folded(name: str) -> str:
    return name.lower().rstrip(".")


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
