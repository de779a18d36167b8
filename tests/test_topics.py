"""Topics are filled in from labels, then KVEVENTS_*, then the downward API; what has no value is refused."""

import pytest

from kvevents_service.errors import ConfigError
from kvevents_service.topics import filled_in

POD = {"POD_NAME": "pod-7", "POD_IP": "10.0.0.7", "NODE_NAME": "node-a"}


@pytest.mark.parametrize(
    ("topic", "labels", "environ", "filled"),
    [
        ("", {}, {}, ""),
        ("kv-events", {}, {}, "kv-events"),
        ("kv@{pod}@{model}", {"model": "org/m"}, POD, "kv@10.0.0.7@org/m"),
        ("kv@{pod}@{model}", {"model": "org/m", "pod": "mine"}, POD, "kv@mine@org/m"),
        ("kv@{pod}@m", {}, {**POD, "KVEVENTS_POD": "env"}, "kv@env@m"),
        ("kv@{pod_name}@m", {}, POD, "kv@pod-7@m"),
        ("kv@{pod}@m", {}, {"POD_NAME": "pod-7"}, "kv@pod-7@m"),
        ("node:{name}", {}, POD, "node:node-a"),
        ("{{x}}", {}, {}, "{x}"),
    ],
)
def test_a_name_is_looked_up(topic: str, labels: dict[str, str], environ: dict[str, str], filled: str) -> None:
    assert filled_in(topic, labels, environ) == filled


@pytest.mark.parametrize(
    ("topic", "expected"),
    [
        ("kv@{pod}@{model}", "labels.model, or one of KVEVENTS_MODEL"),
        ("{colour}", "KVEVENTS_COLOUR"),
        ("kv@{pod", "braces"),
        ("kv@pod}", "braces"),
        ("{}", "a value for {}"),
        ("{pod.x}", "a value for"),
        ("{pod!r}", "only a name"),
        ("{pod:>9}", "only a name"),
        ("kv@{at}@m", "without @"),
        ("{line}", "without @"),
    ],
)
def test_what_cannot_be_filled_in_is_named(topic: str, expected: str) -> None:
    with pytest.raises(ConfigError, match="topic") as caught:
        filled_in(topic, {"at": "a@b", "line": "a\nb"}, POD)
    assert expected in str(caught.value)
