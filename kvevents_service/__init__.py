"""KV-cache offload sidecar and its event stream.

`Subscriber`, `Source` and `PrefixIndex` are for routers; they are loaded when first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvevents_service.prefix_index import PrefixIndex
    from kvevents_service.subscriber import Source, Subscriber

__all__ = ["PrefixIndex", "Source", "Subscriber"]

_HOMES = {"PrefixIndex": "prefix_index", "Source": "items", "Subscriber": "subscriber"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
