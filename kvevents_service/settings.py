"""Where settings come from: a TOML file, then the environment, then flags. What is said last holds.

The variable of a setting is KVEVENTS_ and its name in capitals: text as it is, everything else as JSON or TOML
(`KVEVENTS_OUTPUTS='[{"pub": "tcp://127.0.0.1:5557"}]'`). Bytes may have a unit in all three places (`sizes`).
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from string import Formatter
from typing import Any, Final, NamedTuple, TypeVar, get_type_hints

import msgspec

from kvevents_service.config import OutputConfig, ServeConfig
from kvevents_service.errors import ConfigError
from kvevents_service.nats_config import NatsConfig
from kvevents_service.sizes import EXPECTED, parse_size
from kvevents_service.source_config import SourceConfig

PREFIX: Final = "KVEVENTS_"
CONFIG_VARIABLE: Final = "KVEVENTS_CONFIG"
"""Names the file, where `--config` does not."""

_TEXTS: Final = (str, str | None)
_HINTS: Final = get_type_hints(ServeConfig)
_VARIABLES: Final = {f"{PREFIX}{name.upper()}": name for name in ServeConfig.__struct_fields__}
_SERVICE_LINK: Final = re.compile(
    r"KVEVENTS_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)", re.ASCII
)
"""What Kubernetes sets in every pod beside a Service whose name begins with `kvevents`."""
_TABLES: Final[dict[str, type[msgspec.Struct]]] = {
    "outputs": OutputConfig,
    "sources": SourceConfig,
    "nats": NatsConfig,
}
_NAMES: Final = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "array": "a list",
    "object": "a table",
    "null": "nothing",
}
_MISMATCH: Final = re.compile(r"Expected `([^`]+)`, got `([^`]+)`(?: - at `\$\.?([^`]*)`)?")
_MISSING: Final = re.compile(r"Object missing required field `([^`]+)`")
_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class Said(NamedTuple):
    """A value of a setting, and where it was said: a file, a variable or a flag."""

    setting: str
    value: Any
    origin: str


class Loaded(NamedTuple):
    """The settings in effect. origins: where each was said that is not its default."""

    config: ServeConfig
    origins: dict[str, str]


def load_config(path: Path | None, overrides: Mapping[str, Any]) -> ServeConfig:
    """The settings of a file and overrides, whatever the environment is."""
    return load_settings(path, overrides, {}).config


def load_settings(path: Path | None, flags: Mapping[str, Any], environ: Mapping[str, str]) -> Loaded:
    """All three together; flags that are None say nothing. ConfigError names the first bad key by its path."""
    said = [*_of_file(path), *_of_environment(environ), *_of_flags(flags)]
    values = {one.setting: one.value for one in said}
    origins = {one.setting: one.origin for one in said}
    try:
        _check_variables(environ, values)
        return Loaded(_whole(values), origins)
    except ConfigError as error:
        root = re.split(r"[.\[]", error.setting, maxsplit=1)[0]
        origin = origins.get(root, "")
        if not origin or origin.startswith("--"):
            raise
        raise ConfigError(error.setting, f"{error.expected} (said by {origin})") from error


# the three places


def _of_file(path: Path | None) -> Iterator[Said]:
    if path is not None:
        for key, value in _read(path).items():
            yield Said(key, value, str(path))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError("config", f"a readable file, not {path} ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError("config", f"TOML in {path} ({error})") from error


def _of_environment(environ: Mapping[str, str]) -> Iterator[Said]:
    for variable, setting in _VARIABLES.items():
        if variable in environ:
            text = environ[variable]
            yield Said(setting, text if _HINTS[setting] in _TEXTS else _parsed(text), variable)


def _parsed(text: str) -> Any:
    """JSON, or a TOML value; else the text itself, as a size with a unit is."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        table = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    return table["value"] if len(table) == 1 else text


def _of_flags(flags: Mapping[str, Any]) -> Iterator[Said]:
    for setting, value in flags.items():
        if value is not None:
            yield Said(setting, value, f"--{setting.replace('_', '-')}")


def _check_variables(environ: Mapping[str, str], values: Mapping[str, Any]) -> None:
    """A variable that nobody reads is a slip. Names in topics and Kubernetes' own variables are none."""
    known = {*_VARIABLES, CONFIG_VARIABLE, *(f"{PREFIX}{name.upper()}" for name in _topic_names(values))}
    for variable in environ:
        if variable.startswith(PREFIX) and variable not in known and not _SERVICE_LINK.fullmatch(variable):
            raise ConfigError(variable, f"a variable of a setting{_nearest(variable, known, PREFIX)}")


def _topic_names(values: Mapping[str, Any]) -> Iterator[str]:
    outputs, nats = (found if isinstance(found := values.get(key), list) else [] for key in ("outputs", "nats"))
    for table in (values, *outputs, *nats):
        for key in ("topic", "subject") if isinstance(table, Mapping) else ():
            if isinstance(table.get(key), str):
                yield from _names_in(table[key])


def _names_in(topic: str) -> list[str]:
    try:
        return [name for _, name, _, _ in Formatter().parse(topic) if name]
    except ValueError:  # refused later, by its path
        return []


# all of it, checked


def _whole(values: dict[str, Any]) -> ServeConfig:
    both = [key for key in OutputConfig.__struct_fields__ if key in values and "outputs" in values]
    if both:
        raise ConfigError(", ".join(both), "to stand in each of [[outputs]], or there to be no [[outputs]]")
    labels = values.get("labels")
    for key, kind in _TABLES.items():
        if isinstance(values.get(key), list):
            made = [_convert(table, kind, f"{key}[{number}]") for number, table in enumerate(values[key])]
            values = {**values, key: made}
    for name, value in labels.items() if isinstance(labels, dict) else ():
        if not isinstance(value, str):
            raise ConfigError(f"labels.{name}", f"text, not {_name(type(value).__name__)}")
    return _convert(values, ServeConfig, "")


def _convert(table: Any, kind: type[_Struct], place: str) -> _Struct:
    """A table as what it must be; errors have its place before their key."""
    dot = f"{place}." if place else ""
    if isinstance(table, dict):
        _check_known(table, kind.__struct_fields__, dot)
        table = {key: _in_bytes(dot, key, value) for key, value in table.items()}
    try:
        return msgspec.convert(table, kind)
    except ConfigError as error:
        raise ConfigError(f"{dot}{error.setting}", error.expected) from error
    except msgspec.ValidationError as error:
        raise _named(str(error), place, dot) from error


def _check_known(table: dict[str, Any], known: Iterable[str], dot: str) -> None:
    for key in table:
        if key not in known:
            raise ConfigError(f"{dot}{key}", f"a known setting{_nearest(key, known)}")


def _in_bytes(dot: str, key: str, value: Any) -> Any:
    if not key.endswith("_bytes") or value is None:
        return value
    size = parse_size(value) if isinstance(value, str) else value
    if not isinstance(size, int) or isinstance(size, bool):
        raise ConfigError(f"{dot}{key}", EXPECTED)
    return size


def _named(message: str, place: str, dot: str) -> ConfigError:
    """What msgspec says, as an error of ours."""
    if missing := _MISSING.match(message):
        return ConfigError(f"{dot}{missing[1]}", "a value: it has no default")
    if found := _MISMATCH.match(message):
        key = f"{dot}{found[3]}" if found[3] else place
        return ConfigError(key, f"{_name(found[1].removesuffix(' | null'))}, not {_name(found[2])}")
    return ConfigError(place or "settings", message)


def _name(kind: str) -> str:
    return _NAMES.get({"list": "array", "dict": "object"}.get(kind, kind), kind)


def _nearest(word: str, known: Iterable[str], prefix: str = "") -> str:
    names = [name.removeprefix(prefix) for name in known]
    near = get_close_matches(word.removeprefix(prefix), names, n=1)
    return f"; did you mean {prefix}{near[0]}?" if near else ""
