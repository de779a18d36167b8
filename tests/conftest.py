"""Every async test runs on both event loops; hypothesis sets no deadlines, because the machines are shared."""

import asyncio
import signal

import uvloop
from hypothesis import settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell's job in the background ignores it, and so would all that the tests start and interrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("kvevents", deadline=None)
settings.load_profile("kvevents")


def pytest_asyncio_loop_factories(config: object, item: object) -> dict[str, object]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
