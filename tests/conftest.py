"""Every async test runs on both event loops; hypothesis sets no deadlines, because the machines are shared."""

import asyncio

import uvloop
from hypothesis import settings

settings.register_profile("kvevents", deadline=None)
settings.load_profile("kvevents")


def pytest_asyncio_loop_factories(config: object, item: object) -> dict[str, object]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
