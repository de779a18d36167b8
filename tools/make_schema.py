#!/usr/bin/env python3
"""Write proto/schema/*.json from the structs, so that the schema cannot say anything else than the code.

python tools/make_schema.py            write the files
python tools/make_schema.py --check    exit 1 and name the files that are stale
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvevents_service.wire.control import ClientMessage, SidecarMessage
from kvevents_service.wire.events import EventBatch

DIRECTORY = Path(__file__).resolve().parents[1] / "proto" / "schema"
BYTES_NOTE = (
    "Describes MessagePack. A string with contentEncoding base64 stands for the `bin` type: raw bytes, "
    "not base64. A hash is an integer in [-2^63, 2^64) or such bytes. Arrays with prefixItems may be longer."
)


class Source(NamedTuple):
    """A schema file: its title, and the types that may stand at the root of a payload."""

    title: str
    roots: dict[str, Any]


SOURCES = {
    "events.json": Source("KV cache events (payload of a live message)", {"EventBatch": EventBatch}),
    "control.json": Source(
        "Engine protocol (payload of a frame)",
        {"ClientMessage": ClientMessage, "SidecarMessage": SidecarMessage},
    ),
}


def schema(source: Source) -> dict[str, Any]:
    """A JSON Schema 2020-12 document with one definition per struct and one per named root."""
    roots, components = msgspec.json.schema_components(
        source.roots.values(), schema_hook=any_value, ref_template="#/$defs/{name}"
    )
    named = dict(zip(source.roots, roots, strict=True))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": source.title,
        "$comment": BYTES_NOTE,
        "anyOf": [{"$ref": f"#/$defs/{name}"} for name in named],
        "$defs": dict(sorted((named | components).items())),
    }


def any_value(type_: type) -> dict[str, Any]:
    """msgspec knows no schema for `object`, which the structs use for "any MessagePack value"."""
    if type_ is object:
        return {"description": "any MessagePack value"}
    raise NotImplementedError(type_)


def render(name: str) -> str:
    return msgspec.json.format(msgspec.json.encode(schema(SOURCES[name])), indent=2).decode() + "\n"


def stale(directory: Path = DIRECTORY) -> list[str]:
    """Names of the files that are missing or differ from what the structs give."""
    return [name for name in SOURCES if not same(directory / name, render(name))]


def same(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        names = stale()
        for name in names:
            sys.stderr.write(f"proto/schema/{name} is stale: run `make schema`\n")
        return 1 if names else 0
    if arguments:
        sys.stderr.write(__doc__ or "")
        return 2
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for name in SOURCES:
        (DIRECTORY / name).write_text(render(name), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
