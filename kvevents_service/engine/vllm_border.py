"""The border between vLLM's step loop and our halves: a fault of ours ends our part, never a step of vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from kvevents_service.engine.vllm_books import StepOutput
from kvevents_service.engine.vllm_loads import LoadEnd
from kvevents_service.engine.vllm_request import VllmRequest
from kvevents_service.engine.vllm_scheduler import Said, SchedulerHalf
from kvevents_service.engine.vllm_worker import BEFORE_ALL, WorkerHalf

Result = TypeVar("Result")
Tell = Callable[[str], None]
"""Says it, with the exception that is being handled."""

SCHEDULER_FAULT = "kvevents: a fault of ours. Nothing is offloaded until vLLM restarts, and held blocks stay held"
WORKER_FAULT = "kvevents: a fault of ours. This rank has left the sidecar until vLLM restarts"


class SchedulerBorder:
    """`SchedulerHalf`'s verbs. Before `bind`, and after a fault, nothing is found and all is well.

    Requests that wait for a load are told then that it has failed: vLLM computes them, in other blocks. What the
    sidecar may still write to stays referenced for good, since our books can no longer be trusted.
    """

    def __init__(self, tell: Tell) -> None:
        self.half: SchedulerHalf | None = None
        self._tell = tell
        self._waiting: set[str] = set()

    def __repr__(self) -> str:
        return f"<SchedulerBorder {self.half!r} waiting={len(self._waiting)}>"

    def bind(self, half: SchedulerHalf) -> None:
        self.half = half

    def ask(self, otherwise: Result, verb: Callable[..., Result], *about: Any) -> Result:
        """What the half says; `otherwise` if there is none, or it fails."""
        half = self.half
        if half is None:
            return otherwise
        try:
            return verb(half, *about)
        except Exception:  # noqa: BLE001  the border of the step loop: no engine ends for an offload
            self._end(half)
            return otherwise

    def _end(self, half: SchedulerHalf) -> None:
        self.half = None
        self._tell(SCHEDULER_FAULT)
        for verb in (SchedulerHalf.secure, SchedulerHalf.close):
            with suppress(Exception):  # whatever is broken, this is the last that is asked of it
                verb(half)

    # What follows is asked for in every step, or for every request: without a call more than there must be.

    def arrive(self, request: VllmRequest) -> None:
        half = self.half
        try:
            if half is not None:
                half.arrive(request)
        except Exception:  # noqa: BLE001  as above
            assert half is not None, "it was asked"
            self._end(half)

    def find(self, request: VllmRequest, local_tokens: int) -> int | None:
        half = self.half
        try:
            return 0 if half is None else half.find(request, local_tokens)
        except Exception:  # noqa: BLE001  as above
            assert half is not None, "it was asked"
            self._end(half)
            return 0

    def begin_load(self, request: VllmRequest, tables: Sequence[Sequence[int]], tokens: int) -> None:
        half = self.half
        if tokens:
            self._waiting.add(request.request_id)
        try:
            if half is not None:
                half.begin_load(request, tables, tokens)
        except Exception:  # noqa: BLE001  as above
            assert half is not None, "it was asked"
            self._end(half)

    def begin_step(self, output: StepOutput) -> Said:
        half = self.half
        try:
            said = self._nothing() if half is None else half.begin_step(output)
        except Exception:  # noqa: BLE001  as above
            assert half is not None, "nothing can be said"
            self._end(half)
            said = self._nothing()
        if said.ended:
            self._waiting.difference_update(said.ended)
        return said

    def _nothing(self) -> Said:
        return Said(BEFORE_ALL, dict.fromkeys(self._waiting, LoadEnd(failed=True)))

    def land_step(self, number: int) -> None:
        half = self.half
        try:
            if half is not None:
                half.land_step(number)
        except Exception:  # noqa: BLE001  as above
            assert half is not None, "it was asked"
            self._end(half)

    def secure(self) -> None:
        self.ask(None, SchedulerHalf.secure)

    def finish(self, request: VllmRequest, tables: Sequence[Sequence[int]]) -> None:
        half = self.half
        try:
            if half is not None:
                half.finish(request, tables)
        except Exception:  # noqa: BLE001  as above
            assert half is not None, "it was asked"
            self._end(half)

    @property
    def busy(self) -> bool:
        return self.ask(False, lambda half: half.busy)

    def reset(self) -> bool:
        """True: nothing that was stored can be loaded any more."""
        return self.ask(True, SchedulerHalf.reset)

    def close(self) -> None:
        self.ask(None, SchedulerHalf.close)


def or_leave(worker: WorkerHalf, verb: Callable[[WorkerHalf], None], tell: Tell) -> None:
    """Do this; a rank that cannot leaves the sidecar, and goes on without it."""
    try:
        verb(worker)
    except Exception:  # noqa: BLE001  as above
        leave(worker, tell)


def leave(worker: WorkerHalf, tell: Tell) -> None:
    """While an exception of it is handled."""
    tell(WORKER_FAULT)
    with suppress(Exception):  # as above
        worker.leave()
