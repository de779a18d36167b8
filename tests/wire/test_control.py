"""The messages of the engine protocol: every one survives the wire; what a newer peer appends is ignored."""

from typing import Annotated, get_args, get_origin

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents_service.errors import WireError
from kvevents_service.wire import control
from kvevents_service.wire.control import ClientMessage, InnerHash, Offer, SidecarMessage, Step
from kvevents_service.wire.framing import decode_client, decode_sidecar, encode_message

INT64 = st.integers(-(2**63), 2**64 - 1)
KEY = st.one_of(st.none(), st.tuples(st.text(), INT64, st.binary()))
FIELDS = {
    int: INT64,
    int | None: st.one_of(st.none(), INT64),
    float: st.floats(allow_nan=False),
    str: st.text(),
    str | None: st.one_of(st.none(), st.text()),
    bytes: st.binary(),
    bytes | None: st.one_of(st.none(), st.binary()),
    bool: st.booleans(),
    list[bytes]: st.lists(st.binary()),
    list[str]: st.lists(st.text()),
    dict[str, int]: st.dictionaries(st.text(), INT64),
}
CLIENT, SIDECAR = get_args(ClientMessage), get_args(SidecarMessage)
MESSAGES = [*CLIENT, *SIDECAR]


def built(cls: type) -> st.SearchStrategy:
    """Any value of a message type."""
    fields = msgspec.structs.fields(cls)
    return st.builds(cls, *[_value(cls, field.name, field.type) for field in fields])


def _value(cls: type, name: str, kind: object) -> st.SearchStrategy:
    if get_origin(kind) is Annotated:
        return _value(cls, name, get_args(kind)[0])
    if name == "extra_keys":
        return st.one_of(st.none(), KEY if cls is InnerHash else st.lists(KEY))
    if type(None) in get_args(kind) and kind not in FIELDS:
        return st.one_of(st.none(), _value(cls, name, get_args(kind)[0]))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return built(kind)
    nested = get_args(kind)[:1]
    if nested and isinstance(nested[0], type) and issubclass(nested[0], msgspec.Struct):
        return st.lists(built(nested[0]), max_size=3)
    return FIELDS[kind]


def decode(cls: type, body: bytes) -> msgspec.Struct:
    return decode_client(body) if cls in CLIENT else decode_sidecar(body)


def body_of(message: msgspec.Struct) -> bytes:
    return bytes(encode_message(message)[control.LENGTH_BYTES :])


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
@given(data=st.data())
def test_every_message_survives_the_wire(cls: type, data) -> None:
    message = data.draw(built(cls))
    assert decode(cls, body_of(message)) == message


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
@given(data=st.data())
def test_what_a_newer_peer_appends_is_ignored(cls: type, data) -> None:
    message = data.draw(built(cls))
    elements = [*msgspec.msgpack.decode(body_of(message)), "new", {"more": [1]}]
    assert decode(cls, msgspec.msgpack.encode(elements)) == message


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
def test_what_an_older_peer_leaves_off_has_its_default(cls: type) -> None:
    required = [field for field in msgspec.structs.fields(cls) if field.required]
    samples = {int: 1, str: "x", float: 1.0, bytes: b"x", bool: True, int | None: None}
    values = [samples.get(field.type, {} if "dict" in str(field.type) else []) for field in required]
    message = decode(cls, msgspec.msgpack.encode([cls.__struct_config__.tag, *values]))
    assert message == cls(*values)


def test_what_a_newer_peer_appends_to_an_offer_is_ignored() -> None:
    offer = ["r", 0, b"h", b"t", b"b", None, None, None, None, None, "new"]
    message = decode_client(msgspec.msgpack.encode(["step", 1, [offer], [], []]))
    assert message == Step(1, [Offer("r", 0, b"h", b"t", b"b")])


def test_tags_are_told_apart_on_each_side() -> None:
    for side in (CLIENT, SIDECAR):
        assert len({cls.__struct_config__.tag for cls in side}) == len(side)


@pytest.mark.parametrize("cls", SIDECAR, ids=lambda cls: cls.__name__)
def test_an_engine_cannot_speak_as_the_sidecar(cls: type) -> None:
    with pytest.raises(WireError):
        decode_client(msgspec.msgpack.encode([cls.__struct_config__.tag, 1, 1, 1, 1, 1]))
