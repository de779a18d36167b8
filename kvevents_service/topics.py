"""Topics filled in at start: `kv@{pod}@{model}`, or `node:{name}` for a tier that a node's pods share.

A name in braces is looked up in the `labels` of the settings, then in the environment as KVEVENTS_<NAME>, then in
what Kubernetes' downward API is usually told to set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from string import Formatter
from typing import Final

from kvevents_service.errors import ConfigError

DOWNWARD: Final = {
    "pod": ("POD_IP", "POD_NAME"),
    "pod_ip": ("POD_IP",),
    "pod_name": ("POD_NAME",),
    "name": ("NODE_NAME",),
    "node": ("NODE_NAME",),
    "namespace": ("POD_NAMESPACE",),
}
"""Variables that are asked for each name, in this order."""


def filled_in(topic: str, labels: Mapping[str, str], environ: Mapping[str, str]) -> str:
    """The topic with every name replaced. ConfigError for a name without a value, or braces that do not match."""
    try:
        parts = list(Formatter().parse(topic))
    except ValueError as error:
        raise ConfigError("topic", f"names in {{braces}} ({error})") from error
    return "".join(_texts(parts, labels, environ))


def _texts(
    parts: list[tuple[str, str | None, str | None, str | None]],
    labels: Mapping[str, str],
    environ: Mapping[str, str],
) -> Iterator[str]:
    for literal, name, spec, conversion in parts:
        yield literal
        if name is not None:
            if spec or conversion:
                raise ConfigError("topic", f"only a name in {{braces}}, as {{{name}}}")
            yield _value(name, labels, environ)


def _value(name: str, labels: Mapping[str, str], environ: Mapping[str, str]) -> str:
    variables = [f"KVEVENTS_{name.upper()}", *DOWNWARD.get(name, ())]
    values = [labels.get(name), *(environ.get(variable) for variable in variables)]
    value = next((value for value in values if value), None)
    if value is None or not name.isidentifier():
        raise ConfigError("topic", f"a value for {{{name}}}: labels.{name}, or one of {', '.join(variables)}")
    if "@" in value or not value.isprintable():
        raise ConfigError("topic", f"a value without @ for {{{name}}}")
    return value
