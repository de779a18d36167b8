"""The loop's lateness is measured: a callback that holds it shows."""

import asyncio
import time

from kvevents_service.service.loop_lag import LoopLag

HELD_S = 0.3


async def test_a_loop_that_is_held_up_is_late() -> None:
    lag = LoopLag(time.monotonic)
    task = asyncio.create_task(lag.run())
    await asyncio.sleep(0.01)
    time.sleep(HELD_S)  # noqa: ASYNC251 - what it is there to see
    while not lag.seconds.count:
        await asyncio.sleep(0.01)
    task.cancel()
    assert 0.15 <= lag.seconds.largest_s < 5
