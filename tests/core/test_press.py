"""A part of a state, as a press writes it, tells what a live batch of the same runs tells."""

from collections.abc import Iterator

import msgspec
import pytest
from doubles.stream import Source
from hypothesis import given, settings
from hypothesis import strategies as st

from core.prompts import FULL, LATENT
from kvevents_service.core.encoding import Encoding
from kvevents_service.core.metadata import BlockStoreMeta, snapshot
from kvevents_service.core.press import Press
from kvevents_service.core.rows import Row, joined
from kvevents_service.errors import WireError
from kvevents_service.testing import make_chain
from kvevents_service.wire import columns, slabs
from kvevents_service.wire.codec import MAX_PAYLOAD_BYTES, decode_batch
from kvevents_service.wire.dialects import DIALECTS
from kvevents_service.wire.events import AllBlocksCleared, BlockStored, Event, EventBatch
from kvevents_service.wire.frames import Payload

ID = b"0123456789abcdef"
TS = 1.5
seeds = st.integers(0, 2**32)


def pressed(encoding: Encoding, runs: list[BlockStoreMeta], *, clear: bool = False) -> EventBatch:
    return decode_batch(payload_of(encoding, runs, clear=clear), read_tokens=True).batch


def payload_of(encoding: Encoding, runs: list[BlockStoreMeta], *, clear: bool = False) -> Payload:
    return encoding.press([*joined(map(Row.of, runs))], TS, Press(), clear=clear)


def live(encoding: Encoding, runs: list[BlockStoreMeta]) -> EventBatch:
    return decode_batch(encoding.encode(runs, TS), read_tokens=True).batch


def block_by_block(events: list[Event]) -> list[Event]:
    """The same with an event for each stored block."""
    parts = (singles(event) if isinstance(event, BlockStored) else [event] for event in events)
    return [single for part in parts for single in part]


def singles(event: BlockStored) -> Iterator[BlockStored]:
    parents = [event.parent_block_hash, *event.block_hashes]
    for place, (name, parent) in enumerate(zip(event.block_hashes, parents, strict=False)):
        tokens = event.token_ids[place * event.block_size : (place + 1) * event.block_size]
        keys = event.extra_keys and event.extra_keys[place : place + 1]
        yield msgspec.structs.replace(
            event, block_hashes=[name], parent_block_hash=parent, token_ids=tokens, extra_keys=keys
        )


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("sender", [None, ID], ids=["unnamed", "named"])
@pytest.mark.parametrize("dialect", DIALECTS)
@given(seeds)
@settings(max_examples=10)
def test_it_says_what_a_live_batch_says(dialect: str, sender: bytes | None, quick: bool, seed: int) -> None:
    encoding = Encoding(dialect, 3, sender)
    with pytest.MonkeyPatch.context() as patch:
        if not quick:
            patch.setattr(columns, "numpy", None)
            patch.setattr(slabs, "numpy", None)
        for batch in Source(seed).batches(5):
            runs = [item for item in batch if isinstance(item, BlockStoreMeta)]
            told, said = pressed(encoding, runs), live(encoding, runs)
            assert block_by_block(told.events) == block_by_block(said.events)
            assert msgspec.structs.replace(told, events=[]) == msgspec.structs.replace(said, events=[])


def run_of(blocks: int, parent: bytes | None = None) -> BlockStoreMeta:
    chain = make_chain(range(7, 7 + blocks * FULL.block_size), FULL.block_size, parent)
    return snapshot(chain.offer(range(blocks)), FULL, "CPU", 32)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "parent", [None, bytes(32), b"\xc1" * 32, bytes(24) + b"\x7f" * 8, b"\xff" * 32], ids=range(5)
)
@pytest.mark.parametrize("blocks", [1, 15, 16, 70])
def test_its_arrays_are_in_their_places_whatever_the_parent_is_called(
    dialect: str, parent: bytes | None, blocks: int
) -> None:
    main = msgspec.structs.replace(FULL, main=True)
    run = msgspec.structs.replace(
        run_of(blocks, parent), group=main, medium="GPU", lora_name="\u00c1" * 40, lora_id=1 << 40
    )
    encoding = Encoding(dialect)
    assert pressed(encoding, [run]).events == live(encoding, [run]).events != []


def test_runs_that_continue_each_other_are_one_event_and_a_clear_comes_first() -> None:
    run = run_of(5)
    pieces = [run.part(0, 1), run.part(1, 2), run.part(2, 5), run.part(1, 2)]
    (whole, again) = live(Encoding(), [run, run.part(1, 2)]).events
    assert pressed(Encoding(), pieces, clear=True).events == [AllBlocksCleared(), whole, again]
    assert pressed(Encoding("aibrix"), [], clear=True).events == [AllBlocksCleared()]


def test_hashes_of_several_lengths_come_as_they_are() -> None:
    short = msgspec.structs.replace(run_of(2), block_hashes=bytes(range(32)), hash_bytes=16, group=LATENT)
    runs = [run_of(3), short]
    assert pressed(Encoding(), runs).events == live(Encoding(), runs).events


def test_a_payload_stays_what_it_is_when_the_press_goes_on() -> None:
    press, encoding = Press(), Encoding()
    rows = [[Row.of(run_of(blocks))] for blocks in (70, 3, 200)]
    made = [encoding.press(part, TS, press, clear=False) for part in rows]
    assert [bytes(payload) for payload in made] == [
        bytes(encoding.press(part, TS, Press(), clear=False)) for part in rows
    ]


def test_what_is_too_large_for_a_reader_is_refused() -> None:
    run = msgspec.structs.replace(run_of(1), extra_keys=[("x" * MAX_PAYLOAD_BYTES,)])
    with pytest.raises(WireError, match="payload"):
        payload_of(Encoding(), [run])
