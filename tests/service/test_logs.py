"""The log: text or JSON, one line each, and never a token id."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import msgspec
import pytest

from kvevents_service.errors import ConfigError
from kvevents_service.service.logs import Formatter, JsonFormatter
from kvevents_service.testing import make_chain
from kvevents_service.wire.control import Offer, Step
from kvevents_service.wire.packing import pack_int32, unpack_int32

CANARY = 1_234_567_891


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What this package logs, as JSON."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("kvevents_service")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(before)


def test_a_json_line_has_what_a_text_line_has(lines: io.StringIO) -> None:
    log = logging.getLogger("kvevents_service.x")
    try:
        raise ConfigError("pub", "an\nendpoint")
    except ConfigError:
        log.exception("copy %d failed", 3, extra={"fields": {"rank": 1}})
    (line,) = lines.getvalue().splitlines()
    said = json.loads(line)
    assert (said["level"], said["logger"], said["message"]) == ("error", "kvevents_service.x", "copy 3 failed")
    assert said["rank"] == 1
    assert said["error"].endswith("ConfigError: pub: expected an\nendpoint")
    assert said["ts"] > 0


@pytest.mark.parametrize(
    ("error", "words"), [(OSError(28, "No space"), "No space"), (KeyError(CANARY), "KeyError")]
)
def test_only_our_words_and_the_systems_are_said_of_an_error(error: Exception, words: str) -> None:
    with pytest.raises(type(error)) as raised:
        raise error
    text = Formatter().formatException((type(error), error, raised.tb))
    assert "test_logs.py" in text
    assert words in text.splitlines()[-1]
    assert str(CANARY) not in text


async def test_no_line_has_token_ids(run, engine, lines: io.StringIO) -> None:
    """A store, offers that cannot be meant, a copy that fails, and a bug of ours that quotes a whole offer."""
    good = make_chain((CANARY,) * 8, 4).offer([0, 1])
    async with run() as service:
        mini = await asyncio.to_thread(engine)
        step = mini.client.step

        async def offer(*offers: Offer) -> None:
            await asyncio.to_thread(step, list(offers))
            await asyncio.to_thread(mini.wait)

        await offer(good)
        for change in BAD:
            await offer(msgspec.structs.replace(good, **change))
        service.sidecar.tier.scheduler.stores.begin = quoting
        await offer(good)
    assert "quoting" in lines.getvalue()
    for form in (str(CANARY), str(pack_int32([CANARY])), pack_int32([CANARY]).hex()):
        assert form not in lines.getvalue()


BAD = (
    {"token_ids": pack_int32([CANARY] * 3)},
    {"block_ids": pack_int32([10_000, 10_001])},
    {"group": 7},
    {"block_hashes": b"x"},
)


def quoting(session_id: int, step: Step, now: float) -> None:
    raise ValueError(f"a bug that quotes {step} and {unpack_int32(step.offers[0].token_ids)}")
