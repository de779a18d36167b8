"""Every captured layout, as a recording of an engine of its kind, relayed to a reader: the frames are those of
proto/vectors."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from test_relay import Running, relayed

from kvevents_service.core.residency import Residency
from kvevents_service.source_config import SourceConfig
from kvevents_service.wire.codec import decode_batch

VECTORS = Path(__file__).parents[2] / "proto" / "vectors"
WRITERS = {"SGLang": "sglang"}
"""Who writes a layout, by a word in its note: all others are vLLM's, which TensorRT-LLM writes too."""


class Recorded(NamedTuple):
    """Lines of one topic that the engine sent, live or as replies."""

    name: str
    engine: str
    lines: list[dict[str, Any]]

    @property
    def fold(self) -> Residency:
        """What a reader makes of them by itself, as far as it is of the engine's own tiers."""
        fold = Residency()
        for payload in (bytes.fromhex(line["frames"][-1]) for line in self.lines):
            events = decode_batch(payload).batch.events if payload else []
            fold.apply(event for event in events if getattr(event, "locality", None) != "REMOTE")
        return fold


def captured() -> Iterator[Recorded]:
    for path in sorted(VECTORS.glob("*.jsonl")):
        lines = [line for line in map(json.loads, path.read_text().splitlines()) if "frames" in line]
        if path.stem == "layouts":
            for number, line in enumerate(lines):
                engine = next((name for word, name in WRITERS.items() if word in line["note"]), "vllm")
                yield Recorded(f"layout {number}: {line['note'][:40]}", engine, [line])
        elif path.stem != "invalid":
            yield Recorded(path.stem, "vllm", lines)


def whole(fold: Residency) -> dict[tuple[str, int], set[int]]:
    """The blocks whose parents are there."""
    found = {}
    for shelf, blocks in fold.shelves.items():
        there = {name for name in blocks if _is_whole(blocks, name)}
        if there:
            found[shelf.medium, shelf.group] = there
    return found


def _is_whole(blocks: dict[int, int | None], name: int | None) -> bool:
    while name is not None and name in blocks:
        name = blocks[name]
    return name is None


def known(relay: Running) -> dict[tuple[str, int], set[int]]:
    folds = relay.subscriber.state().values()
    return {tuple(shelf): set(blocks) for fold in folds for shelf, blocks in fold.shelves.items() if blocks}  # type: ignore[misc]


@pytest.mark.parametrize("recorded", [*captured()], ids=lambda recorded: recorded.name)
async def test_a_recording_of_it_is_relayed(tmp_path: Path, recorded: Recorded) -> None:
    path = tmp_path / "stream.jsonl"
    path.write_text("\n".join(map(json.dumps, recorded.lines)))
    async with relayed(SourceConfig(input=str(path), engine=recorded.engine)) as relay:
        await relay.until(lambda: relay.service.ranks[0].relay.relayed[0].feed.ended)  # type: ignore[union-attr]
        await relay.until(lambda: known(relay) == whole(recorded.fold))
        for fold in relay.subscriber.state().values():
            fold.check()
        counts = relay.view.counts
        assert counts["undecodable"] == 0
        waiting = sum(map(len, recorded.fold.shelves.values())) - sum(map(len, whole(recorded.fold).values()))
        assert (counts["orphans"], relay.view.engine) == (waiting, recorded.engine)
        assert counts["stored"] + counts["duplicates"] == recorded.fold.stored
