"""What an output keeps back: the stream stays whole, and holds nothing that it must not."""

import pytest
from doubles.mooncake import Index as Mooncake
from doubles.stream import GROUPS, MAIN, MEDIA, Source
from hypothesis import given, settings
from hypothesis import strategies as st

from kvevents_service.core.encoding import Encoding
from kvevents_service.core.metadata import BlockStoreMeta, RemovedRun
from kvevents_service.core.prefix_index import BlockIndex
from kvevents_service.core.press import Press
from kvevents_service.core.privacy import Privacy, key_of, mapped
from kvevents_service.core.residency import Residency, key64
from kvevents_service.core.rows import Row
from kvevents_service.testing import make_chain
from kvevents_service.wire.codec import decode_batch
from kvevents_service.wire.dialects import DIALECTS, Groups
from kvevents_service.wire.events import BlockStored, Event
from kvevents_service.wire.hashes import hash_in
from kvevents_service.wire.packing import pack_int32

KEY = key_of(b"0123456789abcdef")
HIDING = Privacy(redact_tokens=True, hash_key=KEY)
MEANINGLESS = [name for name, dialect in DIALECTS.items() if dialect.finds_by != "token_ids"]
SECRET_TOKENS = [70_000 + place for place in range(8)]
seeds = st.integers(0, 2**32)


def secret_run() -> BlockStoreMeta:
    """Two blocks with tokens, an adapter, and the salt of a user."""
    chain = make_chain(SECRET_TOKENS, 4, parent=b"\x07" * 32)
    tokens = pack_int32(SECRET_TOKENS)
    keys = [("users-salt",), None]
    return BlockStoreMeta(MAIN, "GPU", 32, chain.packed, tokens, chain.parent, 3, "ada", keys)


def told(encoding: Encoding, *announcements: object, wide: bool = False) -> list[Event]:
    if wide:
        return [event for item in announcements for event in decode_batch(pressed(encoding, item)).batch.events]
    return decode_batch(encoding.encode(announcements, 1.5)).batch.events  # type: ignore[arg-type]


def pressed(encoding: Encoding, item: object) -> bytes:
    """As a state tells it; what no state tells as a live batch."""
    if isinstance(item, BlockStoreMeta):
        return bytes(encoding.press([Row.of(item)], 1.5, Press(), clear=False))
    return encoding.encode((item,), 1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_no_token_and_no_salt_is_in_a_redacted_payload(dialect: str, wide: bool) -> None:
    redacting = Encoding(dialect, privacy=Privacy(redact_tokens=True))
    plain, payload = (
        pressed(encoding, secret_run()) if wide else encoding.encode([secret_run()], 1.5)
        for encoding in (Encoding(dialect), redacting)
    )
    for token in SECRET_TOKENS:
        assert token.to_bytes(4, "big") in plain
        assert token.to_bytes(4, "big") not in payload
    assert b"users-salt" not in payload


@pytest.mark.parametrize("wide", [False, True])
def test_a_redacted_store_keeps_all_the_rest(wide: bool) -> None:
    (shown,) = told(Encoding(), secret_run(), wide=wide)
    (hidden,) = told(Encoding(privacy=Privacy(redact_tokens=True)), secret_run(), wide=wide)
    assert isinstance(shown, BlockStored)
    assert isinstance(hidden, BlockStored)
    assert (hidden.token_ids, hidden.extra_keys) == ([], None)
    assert (hidden.block_hashes, hidden.parent_block_hash) == (shown.block_hashes, shown.parent_block_hash)
    assert (hidden.block_size, hidden.lora_name, hidden.medium) == (4, "ada", "GPU")


@pytest.mark.parametrize("dialect", MEANINGLESS)
@given(seeds, st.booleans())
@settings(max_examples=25)
def test_the_fold_of_a_hiding_output_is_the_resident_set_by_its_outward_names(
    dialect: str, seed: int, wide: bool
) -> None:
    source, residency = Source(seed), Residency()
    encoding = Encoding(dialect, privacy=HIDING)
    spoken = DIALECTS[dialect]
    for _ in range(20):
        residency.apply(told(encoding, *source.batch(), wide=wide))
        for medium in MEDIA:
            if spoken.medium(medium) is None:
                continue
            for group in GROUPS if spoken.groups is Groups.ALL else (MAIN,):
                names = source.names(medium, group, inner=spoken.inner)
                outward = {key64(hash_in(spoken.hashes, mapped(name, KEY))) for name in names}
                assert residency.hashes(medium, group.index if spoken.groups is Groups.ALL else 0) == outward


def test_a_parent_is_named_as_its_own_store_was() -> None:
    encoding = Encoding(privacy=HIDING)
    whole = secret_run()
    first, second = told(encoding, whole.part(0, 1), whole.part(1, 2))
    (removed,) = told(encoding, RemovedRun(MAIN, "GPU", (whole.hash_at(0),)))
    assert second.parent_block_hash == first.block_hashes[0] == removed.block_hashes[0]
    assert first.parent_block_hash != told(Encoding(), whole.part(0, 1))[0].parent_block_hash


@given(st.binary(min_size=8, max_size=64), st.binary(min_size=16, max_size=100))
def test_an_outward_name_depends_on_the_salt_and_is_as_long(digest: bytes, salt: bytes) -> None:
    name = mapped(digest, key_of(salt))
    assert len(name) == len(digest)
    assert name == mapped(digest, key_of(salt))
    assert mapped(digest, key_of(salt + b"x")) != name != digest


def test_outputs_share_bytes_only_where_they_hide_the_same() -> None:
    keys = {
        Encoding(privacy=privacy).key
        for privacy in (
            Privacy(),
            Privacy(True),
            Privacy(False, KEY),
            Privacy(True, KEY),
            Privacy(True, key_of(b"x")),
        )
    }
    assert len(keys) == 5
    assert Encoding(privacy=Privacy(True, KEY)).key == Encoding(privacy=Privacy(True, KEY)).key


def test_the_key_is_not_shown() -> None:
    assert repr(HIDING) == "<Privacy redact_tokens=True hash_key=True>"


# readers


def test_mooncakes_reader_takes_a_redacted_stream() -> None:
    index = Mooncake(4, lora="ada")
    payload = Encoding("mooncake", privacy=Privacy(redact_tokens=True)).encode([secret_run()], 1.5)
    index.feed([b"", (0).to_bytes(8, "big"), payload])
    assert index.match([secret_run().hash_at(0), secret_run().hash_at(1)]) == {"GPU": 2}


def test_an_index_by_tokens_counts_a_redacted_store_and_holds_nothing() -> None:
    index = BlockIndex()
    for event in told(Encoding(privacy=Privacy(redact_tokens=True)), secret_run()):
        index.apply("pod", [event])
    assert index.counts["malformed"] == 1
    assert not len(index)


def test_zeros_in_the_place_of_tokens_would_be_believed() -> None:
    """Why the list is empty: a reader by tokens takes zeros for a prompt of zeros."""
    index = BlockIndex()
    run = secret_run()
    root = BlockStoreMeta(MAIN, "GPU", 32, run.block_hashes, bytes(32), None, None, None, None)
    index.apply("pod", told(Encoding(), root))
    assert index.match([0] * 8)["pod"].tokens == 8
