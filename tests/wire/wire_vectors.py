"""The vector table of proto/vectors, read once: every wire test proves itself on the same lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from kvevents_service.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch

DIRECTORY = Path(__file__).parents[2] / "proto" / "vectors"
EVENTS: dict[str, type[Event]] = {cls.__name__: cls for cls in (BlockStored, BlockRemoved, AllBlocksCleared)}


class Vector(NamedTuple):
    id: str
    line: str
    frames: list[bytes]
    decoded: Any

    @property
    def payload(self) -> bytes:
        return self.frames[-1]

    @property
    def batch(self) -> EventBatch:
        return batch_from_json(self.decoded)

    @property
    def unknown_types(self) -> list[str]:
        events = self.decoded["events"] if isinstance(self.decoded, dict) else self.decoded[1]
        types = [event["type"] if isinstance(event, dict) else event[0] for event in events]
        return [type_ for type_ in types if type_ not in EVENTS]


def load(pattern: str) -> list[Vector]:
    vectors = []
    for path in sorted(DIRECTORY.glob(pattern)):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            record = json.loads(line)
            if "frames" in record:
                frames = [bytes.fromhex(frame) for frame in record["frames"]]
                name = f"{path.stem}:{number}:{record.get('note', '')[:40]}"
                vectors.append(Vector(name, line, frames, plain(record.get("decoded"))))
    return vectors


def plain(value: Any) -> Any:
    """JSON has no bytes: the vectors write them `{"bin": hex}`."""
    if isinstance(value, dict):
        if value.keys() == {"bin"}:
            return bytes.fromhex(value["bin"])
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def batch_from_json(decoded: Any) -> EventBatch:
    if isinstance(decoded, dict):
        decoded = [decoded["ts"], decoded["events"], decoded["data_parallel_rank"]]
    ts, events, *rest = decoded
    return EventBatch(ts, [built for event in events if (built := event_from_json(event))], *rest)


def event_from_json(event: Any) -> Event | None:
    if isinstance(event, list):
        event = dict(zip(("type", *EVENTS[event[0]].__struct_fields__), event, strict=False))
    if event["type"] not in EVENTS:
        return None
    cls = EVENTS[event["type"]]
    return cls(**{name: event.get(name) for name in cls.__struct_fields__})


ALL = load("*.jsonl")
INVALID = load("invalid.jsonl")
DECODED = [vector for vector in ALL if vector.decoded is not None]
CAPTURED = [vector for vector in DECODED if vector.id.startswith("vllm-0.33-")]
PAYLOADS = sorted({vector.payload for vector in ALL if vector.payload})
