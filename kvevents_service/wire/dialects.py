"""Temporary: replaced by the branch `dialects`."""

from __future__ import annotations

from typing import NamedTuple


class Dialect(NamedTuple):
    name: str
    contiguous_from_request: bool = False
    publisher_id: bool = False


DIALECTS = {name: Dialect(name, name == "vllm-router", name == "vllm") for name in ("vllm", "vllm-router")}
