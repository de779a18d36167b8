"""A batch without what its users wrote: for recordings that are given away.

Tokens become zeros, as many as there were; extra keys (salts, names of adapters, hashes of images) become digests.
Hashes, parents, sizes, media, order and layout stay, which is what a fault is found by.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any, Final

import msgspec

from kvevents_service.wire.events import BlockStored
from kvevents_service.wire.layouts import KNOWN

_FIELDS: Final = BlockStored.__struct_fields__
_TOKENS: Final = ("token_ids", "lookahead_token_ids")
_FOREIGN: Final = (ValueError, TypeError, RecursionError)
_decoder: Final = msgspec.msgpack.Decoder(list[Any] | dict[str, Any])


def redacted(payload: bytes) -> bytes | None:
    """The same batch in its own layout; None for what is none, and could hold anything."""
    try:
        batch: Any = _decoder.decode(payload)
        if isinstance(batch, dict):
            batch["events"] = [_redacted(event) for event in batch["events"]]
        else:
            batch[1] = [_redacted(event) for event in batch[1]]
        return msgspec.msgpack.encode(batch)
    except (*_FOREIGN, KeyError, IndexError):
        return None


def _redacted(event: Any) -> Any:
    """Of an event of unknown type only the type is left."""
    places = [*event] if isinstance(event, dict) else range(1, len(event))
    tag = event["type"] if isinstance(event, dict) else event[0]
    if tag not in KNOWN:
        return {"type": tag} if isinstance(event, dict) else [tag]
    if tag == BlockStored.__name__:
        for place in places:
            event[place] = _hidden(_name(place), event[place])
    return event


def _name(place: str | int) -> str:
    """Of a position in an array: that of the field there."""
    if isinstance(place, str):
        return place
    return _FIELDS[place - 1] if place <= len(_FIELDS) else ""


def _hidden(name: str, value: Any) -> Any:
    if name in _TOKENS:
        return _zeros(value)
    return _digests(value) if name == "extra_keys" else value


def _zeros(tokens: Any) -> Any:
    return [_zeros(token) for token in tokens] if isinstance(tokens, list) else None if tokens is None else 0


def _digests(value: Any) -> Any:
    if isinstance(value, list):
        return [_digests(item) for item in value]
    return None if value is None else sha256(msgspec.msgpack.encode(value)).hexdigest()[:16]
