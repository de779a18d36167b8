"""Copies under way: each one is begun on every rank, and has ended when every rank has reported."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from kvevents_service.core.commands import Command
from kvevents_service.core.metadata import TransferMeta
from kvevents_service.core.ranks import RankReports
from kvevents_service.service.copy_meter import CopyMeter
from kvevents_service.service.open_tier import OpenTier
from kvevents_service.service.rarely import is_told
from kvevents_service.service.roster import Session
from kvevents_service.service.rota import Rota
from kvevents_service.transfer.worker import CopyFailed, OwnerGone, TransferFuture

log = logging.getLogger(__name__)


class Copies:
    """Starts copies and tells the scheduler how they ended. `perform` does what it says then."""

    def __init__(self, perform: Callable[[Iterable[Command]], None], meter: CopyMeter, rota: Rota) -> None:
        self.reports = RankReports()
        self.running = self.failed = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self._perform = perform
        self._meter = meter
        self._rota = rota

    def __repr__(self) -> str:
        return f"<Copies running={self.running} failed={self.failed}>"

    def start(
        self, transfer: TransferMeta, tier: OpenTier, engine: Session | None, holders: Mapping[int, Session]
    ) -> None:
        """On every rank: the memory is that of its holder; of the first tier, where the copy is no engine's."""
        lanes = tier.lanes_of(transfer)
        self.reports.begin(transfer, len(lanes))
        self._meter.begin(transfer, tier.medium_of(transfer))
        if engine is not None:
            engine.copies += 1
        self.idle.clear()
        for rank, lane in enumerate(lanes):
            holder = holders.get(rank)
            memory = tier.host[rank] if holder is None else holder.memory
            assert memory is not None, "a rank is there when its memory is"
            if holder is not None:
                holder.copies += 1
            self.running += 1
            future = lane.submit(transfer, memory, None if engine is None else engine.mark)
            future.add_done_callback(partial(self._report, partial(self._rank_ended, rank, holder, engine, tier)))

    def _report(self, rank_ended: Callable[[TransferFuture], None], future: TransferFuture) -> None:
        self._rota.take(partial(rank_ended, future))

    def _rank_ended(
        self, rank: int, holder: Session | None, engine: Session | None, tier: OpenTier, future: TransferFuture
    ) -> None:
        self.running -= 1
        if holder is not None:
            holder.copies -= 1
        failure = self._failure(future, rank)
        if isinstance(failure, CopyFailed) and failure.lost:
            self._perform(tier.scheduler.lose(future.meta, failure.lost))
        good = self.reports.report(future.meta, rank, good=failure is None)
        if good is not None:
            self._end(future.meta, tier, engine, good=good)
        if holder is not None:
            holder.copy_ended()
        if not self.running:
            self.idle.set()

    def _end(self, meta: TransferMeta, tier: OpenTier, engine: Session | None, *, good: bool) -> None:
        if engine is not None:
            engine.copies -= 1
        self._meter.end(meta, tier.block_bytes, good=good)
        end = tier.scheduler.complete if good else tier.scheduler.fail
        self._perform(end(meta))
        if engine is not None:
            engine.copy_ended()

    def _failure(self, future: TransferFuture, rank: int) -> CopyFailed | asyncio.CancelledError | None:
        try:
            future.result()
        except (CopyFailed, asyncio.CancelledError) as error:
            self.failed += 1
            if is_told(self.failed):
                level = logging.INFO if isinstance(error, OwnerGone) else logging.WARNING
                kind, text = future.meta.kind, "%s failed on rank %d (%d copies so far): %s"
                log.log(level, text, kind, rank, self.failed, error)
            return error
        return None
