"""Frozen snapshots: what was in the column, whatever has become of it."""

from typing import Any

from kvevents_service.core.frozen_metas import FrozenMetas


def test_what_is_saved_before_it_changes_is_read_as_it_was() -> None:
    live: list[Any] = ["a", "b", "c"]
    frozen = FrozenMetas(live)
    assert frozen.part(0, 3) == ["a", "b", "c"]
    for new in ("x", "y"):
        frozen.save([1])
        live[1] = new
    live.append("d")
    assert ([frozen.at(slot) for slot in range(3)], frozen.part(1, 3)) == (["a", "b", "c"], ["b", "c"])
