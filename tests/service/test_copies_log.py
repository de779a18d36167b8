"""What the log says of copies that failed."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kvevents_service.service.copies import Copies
from kvevents_service.service.copy_meter import CopyMeter
from kvevents_service.service.rota import Rota
from kvevents_service.transfer.worker import CopyFailed, OwnerGone, TransferFuture


@pytest.mark.parametrize(
    ("failure", "level"),
    [(OwnerGone("killed"), logging.INFO), (CopyFailed("EIO"), logging.WARNING)],
    ids=["its engine is gone", "a disk"],
)
async def test_an_engine_that_was_killed_is_nothing_to_warn_of(
    failure: CopyFailed, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    copies = Copies(lambda _: None, CopyMeter(lambda: 0.0), Rota())
    meta: Any = SimpleNamespace(kind="store")
    future = TransferFuture(meta, loop=asyncio.get_running_loop())
    future.set_exception(failure)
    with caplog.at_level(logging.INFO, "kvevents_service"):
        assert copies._failure(future, 0) is failure
    assert [record.levelno for record in caplog.records] == [level]
    assert copies.failed == 1
