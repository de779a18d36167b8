"""`kvevents serve --print-config`: the settings in effect, as a TOML file that would give them again."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import tomli_w

from kvevents_service.config import OutputConfig
from kvevents_service.settings import Loaded
from kvevents_service.version import VERSION


def effective_toml(loaded: Loaded) -> str:
    """One setting a line, with where it was said. Tables stand last, as TOML wants it."""
    plain, tables = list[str](), list[str]()
    for setting, value in _values(loaded).items():
        origin = loaded.origins.get(setting, "default")
        if value in ((), {}):
            continue
        if isinstance(value, list | dict):
            tables.append(f"\n# {origin}\n{tomli_w.dumps({setting: value})}")
        elif value is None:
            plain.append(f"# {setting} is not set\n")
        else:
            plain.append(f"{tomli_w.dumps({setting: value}).rstrip()}  # {origin}\n")
    return "".join([f"# kvevents {VERSION}: the settings in effect\n", *plain, *tables])


def _values(loaded: Loaded) -> dict[str, object]:
    values: dict[str, object] = msgspec.structs.asdict(loaded.config)
    for tier in loaded.config.tiers:
        values[f"{tier.prefix}_bytes"] = tier.size_bytes
    if loaded.config.outputs:
        values = {key: value for key, value in values.items() if key not in OutputConfig.__struct_fields__}
    for setting in ("outputs", "nats", "sources"):
        tables = getattr(loaded.config, setting)
        if tables:
            values[setting] = [dict(_said(table)) for table in tables]
    return values


def _said(table: msgspec.Struct) -> Iterator[tuple[str, object]]:
    """TOML has no word for nothing."""
    return ((key, value) for key, value in msgspec.structs.asdict(table).items() if value is not None)
