#!/usr/bin/env python3
"""Write proto/asyncapi.yaml: the planes of the wire as AsyncAPI 3.0.

python tools/make_asyncapi.py            write the file
python tools/make_asyncapi.py --check    exit 1 if it is stale

Format: https://www.asyncapi.com/docs/reference/specification/v3.0.0. Made from the messages' own structs and the
constants of the frames: operations, directions and payloads follow the code. The payloads' schemas are those of
proto/schema. The text is JSON, which is YAML.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, get_args

from kvevents_service.wire.control import PROTOCOL_VERSION, ClientMessage, SidecarMessage
from kvevents_service.wire.dialects import DIALECTS
from kvevents_service.wire.frames import REPLAY_END, SNAPSHOT_EMPTY, SNAPSHOT_REQUEST, replay_request

FILE = Path(__file__).resolve().parents[1] / "proto" / "asyncapi.yaml"
EVENTS, CONTROL = "./schema/events.json", "./schema/control.json"
MSGPACK = "application/vnd.msgpack"
SCHEMA_FORMAT = "application/schema+json;version=2020-12"


def payload(file: str, name: str) -> dict[str, Any]:
    return {"schemaFormat": SCHEMA_FORMAT, "schema": {"$ref": f"{file}#/$defs/{name}"}}


def message(name: str, summary: str, body: dict[str, Any], content_type: str = MSGPACK) -> dict[str, Any]:
    return {"name": name, "summary": summary, "contentType": content_type, "payload": body}


def first_line(struct: type) -> str:
    return (struct.__doc__ or "").strip().splitlines()[0]


def control_messages() -> dict[str, Any]:
    """Every message of the engine protocol under the name of its struct."""
    structs = (*get_args(ClientMessage), *get_args(SidecarMessage))
    return {one.__name__: message(one.__name__, first_line(one), payload(CONTROL, one.__name__)) for one in structs}


def event_messages() -> dict[str, Any]:
    hexed = {
        "ReplayRequest": ("Two frames: empty, and the first number wanted, 8 bytes big endian.", replay_request(0)),
        "ReplayEnd": ("The last message of a reply.", REPLAY_END),
        "SnapshotRequest": ("One frame.", [SNAPSHOT_REQUEST]),
    }
    batch = payload(EVENTS, "EventBatch")
    plain = {
        name: message(
            name,
            f"{text} As hex: {', '.join(frame.hex() or '(empty)' for frame in frames)}.",
            {"type": "string", "contentEncoding": "base16"},
            "application/octet-stream",
        )
        for name, (text, frames) in hexed.items()
    }
    return {
        "EventBatch": message("EventBatch", "Frames: topic, number as 8 bytes big endian, batch.", batch),
        "ReplayedBatch": message("ReplayedBatch", "Frames: empty, topic, number, batch; one of a reply.", batch),
        "Snapshot": message(
            "Snapshot",
            f"Frames: number, publisher id, batches. {SNAPSHOT_EMPTY}: nothing was numbered; below: not now.",
            batch,
        ),
        **plain,
    }


def channel(title: str, names: list[str], address: str) -> dict[str, Any]:
    refs = {name: {"$ref": f"#/components/messages/{name}"} for name in names}
    return {"title": title, "address": address, "messages": refs}


def operation(action: str, place: str, names: list[str], reply: list[str] | None = None) -> dict[str, Any]:
    where = {"$ref": f"#/channels/{place}"}
    found: dict[str, Any] = {"action": action, "channel": where, "messages": refs_in(place, names)}
    return found if reply is None else {**found, "reply": {"channel": where, "messages": refs_in(place, reply)}}


def refs_in(place: str, names: list[str]) -> list[dict[str, str]]:
    return [{"$ref": f"#/channels/{place}/messages/{name}"} for name in names]


def document() -> dict[str, Any]:
    """What the sidecar does, seen from itself: it sends events, and receives requests and engines' messages."""
    asked, told = ([one.__name__ for one in get_args(kind)] for kind in (ClientMessage, SidecarMessage))
    replay, snapshot = ["ReplayedBatch", "ReplayEnd"], ["Snapshot"]
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "kvevents",
            "version": str(PROTOCOL_VERSION),
            "description": "KV cache events for routers, and the engine protocol. SPEC.md is the contract. "
            f"Dialects write the same events for other readers: {', '.join(DIALECTS)}.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": MSGPACK,
        "servers": {
            "events": {"host": "127.0.0.1:5557", "protocol": "zmtp", "description": "PUB: `--pub`."},
            "replay": {"host": "127.0.0.1:5558", "protocol": "zmtp", "description": "ROUTER: `--replay`."},
            "snapshot": {"host": "127.0.0.1:5559", "protocol": "zmtp", "description": "ROUTER: `--snapshot`."},
            "engines": {"host": "engine.sock", "protocol": "unix", "description": "`--engine-socket`: frames of a "
                        "4-byte little-endian length and one message."},
        },
        "channels": {
            "events": {**channel("Event stream", ["EventBatch"], "{topic}"), "servers": [server("events")],
                       "parameters": {"topic": {"description": "`--topic`, the same in every message."}}},
            "replay": {**channel("Replay", ["ReplayRequest", *replay], "replay"), "servers": [server("replay")]},
            "snapshot": {**channel("Snapshot", ["SnapshotRequest", *snapshot], "snapshot"),
                         "servers": [server("snapshot")]},
            "engine": {**channel("Engine protocol", [*asked, *told], "engine"), "servers": [server("engines")]},
        },
        "operations": {
            "publishEvents": operation("send", "events", ["EventBatch"]),
            "answerReplay": operation("receive", "replay", ["ReplayRequest"], replay),
            "answerSnapshot": operation("receive", "snapshot", ["SnapshotRequest"], snapshot),
            "serveEngine": operation("receive", "engine", asked, told),
        },
        "components": {"messages": {**event_messages(), **control_messages()}},
    }  # fmt: skip


def server(name: str) -> dict[str, str]:
    return {"$ref": f"#/servers/{name}"}


def asyncapi_text() -> str:
    return json.dumps(document(), indent=2) + "\n"


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        if FILE.is_file() and FILE.read_text(encoding="utf-8") == asyncapi_text():
            return 0
        sys.stderr.write("proto/asyncapi.yaml is stale: run `make schema`\n")
        return 1
    if arguments:
        sys.stderr.write(__doc__ or "")
        return 2
    FILE.write_text(asyncapi_text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
