"""What may stand in vLLM's `kv_connector_extra_config`, and what it is taken for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, get_type_hints

import msgspec

from kvevents_service.engine.registration import Timeouts
from kvevents_service.errors import ConfigError, expect

WHERE = "kv_connector_extra_config"
MAX_PATH_BYTES = 107
"""Of `sockaddr_un` on Linux, without the NUL at its end."""


def _says(what: str, **limits: Any) -> msgspec.Meta:
    return msgspec.Meta(description=what, **limits)


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The connector's settings. `read` checks them."""

    sidecar: Annotated[str, _says("Path of the sidecar's engine socket. Required.", min_length=1)]
    lazy: Annotated[
        bool,
        _says("Store a block when the engine is about to reuse it, instead of as soon as it is computed."),
    ] = False
    lookup_timeout_s: Annotated[
        float, _says("The longest that one lookup may keep the scheduler waiting; then it is a miss.", gt=0, le=5)
    ] = 0.05
    load_timeout_s: Annotated[
        float, _says("The longest that a request waits for its hit to be loaded; then it is computed.", gt=0)
    ] = 10.0
    held_fraction: Annotated[
        float,
        _says("How much of the engine's blocks may be held at once while they are copied out.", gt=0, le=1),
    ] = 0.5
    batch_steps: Annotated[
        int,
        _says(
            "So many steps are told to the sidecar at once, if there is no reason to hurry and the model has full "
            "attention alone. 1: each by itself.",
            ge=1,
            le=64,
        ),
    ] = 16
    namespace: Annotated[
        str,
        _says(
            "Anything else that tells KV bytes apart, such as a version of the weights. Engines share blocks only "
            "if this and all that vLLM's own configuration says of the model agree."
        ),
    ] = ""

    @property
    def timeouts(self) -> Timeouts:
        """Those of the clients."""
        return Timeouts(lookup_s=self.lookup_timeout_s)


class Row(msgspec.Struct, frozen=True):
    """One option as documentation shows it."""

    name: str
    default: str
    what: str


def rows() -> list[Row]:
    """Every option, in order."""
    hints = get_type_hints(Options, include_extras=True)
    fields = msgspec.structs.fields(Options)
    return [
        Row(field.name, _shown(field.default), hints[field.name].__metadata__[0].description) for field in fields
    ]


def _shown(default: object) -> str:
    return "required" if default is msgspec.NODEFAULT else msgspec.json.encode(default).decode()


def read(extra: Mapping[str, Any]) -> Options:
    """The options. ConfigError naming the one that cannot be meant, and what was expected."""
    if "sidecar" not in extra:
        raise ConfigError(f"{WHERE}.sidecar", "the path of the sidecar's engine socket")
    for name in extra:
        if name not in Options.__struct_fields__:
            raise ConfigError(f"{WHERE}.{name}", f"one of {', '.join(Options.__struct_fields__)}")
    try:
        options = msgspec.convert(dict(extra), Options)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$.")
        raise ConfigError(f"{WHERE}.{place.rstrip('`')}", what.removeprefix("Expected ")) from error
    path = os.fsencode(options.sidecar)
    fits = len(path) <= MAX_PATH_BYTES and b"\0" not in path
    expect(fits, f"{WHERE}.sidecar", f"a path of at most {MAX_PATH_BYTES} bytes, without NUL, as sockets have")
    return options
