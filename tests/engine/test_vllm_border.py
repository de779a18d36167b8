"""A fault of ours ends our part: vLLM's hooks go on saying that nothing is found, and nobody waits for a load."""

from __future__ import annotations

from typing import Any

import pytest
from engine.vllm_toy import ToyVllm

from kvevents_service.engine.vllm_border import SCHEDULER_FAULT, SchedulerBorder
from kvevents_service.engine.vllm_scheduler import SchedulerHalf

HOOKS = ("arrive", "find", "begin_load", "begin_step", "land_step", "finish", "reset")


class Guarded(ToyVllm):
    """As vLLM calls the half: through the border."""

    def __init__(self) -> None:
        super().__init__(blocks=60)
        self.told: list[str] = []
        self.real = self.half
        border: Any = SchedulerBorder(self.told.append)
        border.bind(self.real)
        self.half = border

    def finish_all(self) -> None:
        for _ in range(60):
            if not self.requests and not self.loading:
                return
            self.clock.advance(1.0)
            self.step()
        raise AssertionError(f"still there: {[*self.requests, *self.loading]}")


def break_it(monkeypatch: pytest.MonkeyPatch, hook: str) -> None:
    def fault(*_: object, **__: object) -> None:
        raise KeyError("r0")

    monkeypatch.setattr(SchedulerHalf, hook, fault)


@pytest.mark.parametrize("hook", HOOKS)
def test_whatever_hook_fails_requests_end_as_without_a_sidecar(monkeypatch: pytest.MonkeyPatch, hook: str) -> None:
    vllm = Guarded()
    vllm.add("first", range(16), 2)
    vllm.finish_all()
    vllm.client.end_copies()
    vllm.step()
    assert vllm.pool.reset()
    vllm.add("again", range(20), 2)
    vllm.step()
    assert "again" in vllm.loading, "this one waits when the fault comes"
    break_it(monkeypatch, hook)
    for number in range(3):
        vllm.add(f"r{number}", range(number * 7, number * 7 + 9), 2)
        vllm.step()
    vllm.abort("r2")
    assert vllm.half.reset() or hook == "reset"
    vllm.finish_all()
    assert vllm.told == [SCHEDULER_FAULT]
    assert not vllm.half.busy
    assert vllm.half.begin_step(vllm._output([], _nothing(), [])).ended == {}


def _nothing() -> Any:
    return type(
        "Cached", (), {"req_ids": [], "new_block_ids": [], "num_computed_tokens": [], "resumed_req_ids": set()}
    )


def test_before_a_pool_is_bound_nothing_is_found() -> None:
    told: list[str] = []
    border, request = SchedulerBorder(told.append), ToyVllm().add("r", range(8))
    border.arrive(request)
    assert border.find(request, 0) == 0
    assert border.reset()
    assert not border.busy
    border.close()
    assert told == []
