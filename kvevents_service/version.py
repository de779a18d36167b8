"""The version of this package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final

UNKNOWN: Final = "unknown"


def _installed() -> str:
    try:
        return version("kvevents-service")
    except PackageNotFoundError:
        return UNKNOWN


VERSION: Final = _installed()
"""`unknown` in a checkout that is on the path and not installed."""
