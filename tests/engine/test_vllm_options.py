"""The connector's options: what is wrong is said by name, and documentation knows all of them."""

from pathlib import Path
from typing import Any

import pytest

from kvevents_service.engine.vllm_options import Options, read, rows
from kvevents_service.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def test_only_the_sidecar_must_be_said() -> None:
    options = read({"sidecar": "/run/kvevents/engine.sock"})
    assert options == Options(sidecar="/run/kvevents/engine.sock")
    assert options.timeouts.lookup_s == 0.05


@pytest.mark.parametrize(
    ("extra", "setting", "expected"),
    [
        ({}, "sidecar", "the path"),
        ({"sidecar": ""}, "sidecar", "length >= 1"),
        ({"sidecar": 7}, "sidecar", "`str`, got `int`"),
        ({"sidecar": "/" + "ä" * 54}, "sidecar", "a path of at most 107 bytes"),
        ({"sidecar": "/run\0/s"}, "sidecar", "without NUL"),
        ({"sidecar": "/s", "lasy": True}, "lasy", "one of sidecar, lazy, "),
        ({"sidecar": "/s", "lazy": "yes"}, "lazy", "`bool`, got `str`"),
        ({"sidecar": "/s", "lookup_timeout_s": 0}, "lookup_timeout_s", "> 0"),
        ({"sidecar": "/s", "lookup_timeout_s": 60}, "lookup_timeout_s", "<= 5"),
        ({"sidecar": "/s", "load_timeout_s": -1}, "load_timeout_s", "> 0"),
        ({"sidecar": "/s", "held_fraction": 1.5}, "held_fraction", "<= 1"),
    ],
)
def test_what_cannot_be_meant_is_one_clear_error(extra: dict[str, Any], setting: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(extra)
    assert caught.value.setting == f"kv_connector_extra_config.{setting}"
    assert expected in caught.value.expected
    assert "`$" not in str(caught.value)


def test_every_option_is_documented_as_it_is() -> None:
    page = (ROOT / "docs/vllm.md").read_text()
    for row in rows():
        assert f"| `{row.name}` | {row.default} | {row.what} |" in page
    assert [row.default for row in rows()][:2] == ["required", "false"]
