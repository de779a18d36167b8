"""A file, the environment, flags: who wins, what a slip is told, and where each value came from."""

import tomllib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from kvevents_service.cli.print_config import effective_toml
from kvevents_service.config import OutputConfig, ServeConfig
from kvevents_service.errors import ConfigError
from kvevents_service.nats_config import NatsConfig
from kvevents_service.settings import load_config, load_settings
from kvevents_service.source_config import SourceConfig

FILE = """
topic = "file"
dp_rank = 3
host_bytes = "2MiB"
heartbeat_s = 1
"""
OUTPUTS = """
labels = { model = "org/m" }
[[outputs]]
pub = "tcp://127.0.0.1:5557"
replay = "tcp://127.0.0.1:5558"
[[outputs]]
pub = "tcp://127.0.0.1:5560"
dialect = "dynamo"
topic = "kv@{model}"
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "kv.toml"
    path.write_text(FILE)
    return path


def test_flags_beat_the_environment_and_that_beats_the_file(path: Path) -> None:
    environ = {"KVEVENTS_TOPIC": "env", "KVEVENTS_DP_RANK": "4", "HOME": "/"}
    config, origins = load_settings(path, {"topic": "flag", "dp_rank": None}, environ)
    assert (config.topic, config.dp_rank, config.host_bytes, config.heartbeat_s) == ("flag", 4, 2 << 20, 1.0)
    assert origins == {
        "topic": "--topic",
        "dp_rank": "KVEVENTS_DP_RANK",
        "host_bytes": str(path),
        "heartbeat_s": str(path),
    }


@pytest.mark.parametrize(
    ("variable", "text", "setting", "value"),
    [
        ("KVEVENTS_HOST_BYTES", "4096", "host_bytes", 4096),
        ("KVEVENTS_HOST_BYTES", "4 KiB", "host_bytes", 4096),
        ("KVEVENTS_RETAINED_BYTES", "1_000_000", "retained_bytes", 1_000_000),
        ("KVEVENTS_TOPIC", "8080", "topic", "8080"),
        ("KVEVENTS_TOPIC", "", "topic", ""),
        ("KVEVENTS_STATE_DIR", "true", "state_dir", "true"),
        ("KVEVENTS_ALLOW_REMOTE", "true", "allow_remote", True),
        ("KVEVENTS_HEARTBEAT_S", "0.5", "heartbeat_s", 0.5),
        ("KVEVENTS_LABELS", '{"model": "m"}', "labels", {"model": "m"}),
        ("KVEVENTS_LABELS", '{ model = "m" }', "labels", {"model": "m"}),
    ],
)
def test_a_variable_is_read_as_its_setting_is(variable: str, text: str, setting: str, value: object) -> None:
    assert getattr(load_settings(None, {}, {variable: text}).config, setting) == value


def test_outputs_of_a_variable_are_json_or_toml() -> None:
    for text in ('[{"pub": "ipc:///tmp/a", "dp_rank": 1}]', '[{ pub = "ipc:///tmp/a", dp_rank = 1 }]'):
        (output,) = load_settings(None, {}, {"KVEVENTS_OUTPUTS": text}).config.outputs
        assert (output.pub, output.dp_rank) == ("ipc:///tmp/a", 1)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"KVEVENTS_HOST_BYTS": "1"}, r"^KVEVENTS_HOST_BYTS: .*did you mean KVEVENTS_HOST_BYTES\?"),
        ({"KVEVENTS_X": "1"}, "^KVEVENTS_X: expected a variable of a setting$"),
        ({"KVEVENTS_HOST_BYTES": "many"}, r"^host_bytes: .*size like 8GiB \(said by KVEVENTS_HOST_BYTES\)$"),
        ({"KVEVENTS_HOST_BYTES": ""}, "^host_bytes: "),
        ({"KVEVENTS_HOST_BYTES": "0"}, r"^host_bytes: expected a positive .*\(said by KVEVENTS_HOST_BYTES\)$"),
        ({"KVEVENTS_DP_RANK": "1\nallow_remote = true"}, "^dp_rank: expected a whole number, not text"),
        ({"KVEVENTS_ALLOW_REMOTE": "yes"}, "^allow_remote: expected true or false, not text"),
        ({"KVEVENTS_OUTPUTS": "[3]"}, r"^outputs\[0\]: expected a table, not a whole number"),
        ({"KVEVENTS_OUTPUTS": '[{"pub": "ipc://a"}, {"pub": 1}]'}, r"^outputs\[1\].pub: .*KVEVENTS_OUTPUTS"),
        ({"KVEVENTS_LABELS": "[" * 100_000}, "^labels: expected a table"),
        ({"KVEVENTS_MODEL": "m"}, "^KVEVENTS_MODEL: "),
        ({"KVEVENTS_DP_RANK": "\udcff"}, r"^dp_rank: expected text in UTF-8 \(said by KVEVENTS_DP_RANK\)$"),
        ({"KVEVENTS_NATS": r'["\ud800"]'}, r"^nats\[0\]: expected text in UTF-8"),
        ({"KVEVENTS_DP_RANK": "9" * 5000}, "^dp_rank: expected a whole number, not text"),
    ],
)
def test_a_variable_that_cannot_be_meant_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(None, {}, environ)


ODD = (
    *(
        0,
        -1,
        1.5,
        float("inf"),
        float("nan"),
        True,
        "",
        "x",
        "\0",
        "\udcff",
        [],
        [1],
        ["a"],
        [[]],
        {},
        {"a": 1},
        [{}],
    ),
    *([{"a": 1}], 10**30, -(10**30), datetime(2026, 1, 1), "tcp://[::1]:1", "127.0.0.1:99999", "9" * 5000),
)
TABLES = {
    "outputs": (OutputConfig, {"pub": "tcp://127.0.0.1:1"}),
    "nats": (NatsConfig, {"servers": ["nats://127.0.0.1:1"], "subject": "a"}),
    "sources": (SourceConfig, {"endpoint": "tcp://127.0.0.1:1"}),
}


def oddly_set() -> Iterator[dict[str, object]]:
    """Each key of each table with each odd value."""
    for value in ODD:
        yield from ({key: value} for key in ServeConfig.__struct_fields__)
        for name, (kind, table) in TABLES.items():
            yield {name: [value]}
            yield from ({name: [{**table, key: value}]} for key in kind.__struct_fields__)


def test_any_value_of_any_key_works_or_is_refused_in_a_line() -> None:
    refused: list[ConfigError] = []
    for settings in oddly_set():
        try:
            load_settings(None, settings, {})
        except ConfigError as error:
            refused.append(error)
    assert len(refused) > 1000
    assert not [error for error in refused if not error.setting or len(str(error)) > 500]


def test_a_number_without_end_is_no_toml(tmp_path: Path) -> None:
    path = tmp_path / "f.toml"
    path.write_text(f"dp_rank = {'9' * 5000}")
    with pytest.raises(ConfigError, match=r"^config: expected TOML"):
        load_settings(path, {}, {})


def test_a_flag_that_cannot_work_is_not_blamed_on_the_file(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^dp_rank: expected a whole number from 0 to \d+$"):
        load_settings(path, {"dp_rank": -1}, {})


@pytest.mark.parametrize("place", ["top", "outputs"])
def test_a_name_in_a_topic_may_be_a_variable(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setenv("KVEVENTS_MODEL", "m")
    topic: dict[str, object] = {"topic": "kv@{model}"}
    flags = topic if place == "top" else {"outputs": [{"pub": "ipc://a", **topic}]}
    config = load_settings(None, flags, {"KVEVENTS_MODEL": "m"}).config
    assert config.event_outputs[0].topic == "kv@m"


@pytest.mark.parametrize(
    "variable",
    [
        "KVEVENTS_SERVICE_HOST",
        "KVEVENTS_SERVICE_PORT",
        "KVEVENTS_SERVICE_PORT_EVENTS",
        "KVEVENTS_PORT",
        "KVEVENTS_PORT_5557_TCP_ADDR",
        "KVEVENTS_ADMIN_SERVICE_HOST",
        "KVEVENTS_ADMIN_PORT",
        "KVEVENTS_CONFIG",
    ],
)
def test_what_kubernetes_sets_for_a_service_of_our_name_is_let_be(variable: str) -> None:
    assert load_settings(None, {}, {variable: "tcp://10.0.0.1:9470"}).config == ServeConfig()


def test_no_setting_has_a_name_that_kubernetes_takes() -> None:
    for setting in ServeConfig.__struct_fields__:
        with pytest.raises(ConfigError):
            load_settings(None, {}, {f"KVEVENTS_{setting.upper()}X": "1"})


# what is printed


@pytest.mark.parametrize("text", [FILE, OUTPUTS, "", "disk_path = '/tmp'\ndisk_bytes = '1GiB'"])
def test_the_printed_settings_give_the_same_again(tmp_path: Path, text: str) -> None:
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text(text)
    loaded = load_settings(first, {"stop_s": 3.0}, {"KVEVENTS_LOG_LEVEL": "debug"})
    second.write_text(effective_toml(loaded))
    again = load_config(second, {})
    for setting in set(ServeConfig.__struct_fields__) - {"host_bytes"}:
        assert getattr(again, setting) == getattr(loaded.config, setting), setting
    assert again.tiers == loaded.config.tiers


def test_each_printed_setting_says_where_it_was_said(path: Path) -> None:
    printed = effective_toml(load_settings(path, {"stop_s": 3.0}, {"KVEVENTS_LOG_LEVEL": "debug"}))
    lines = printed.splitlines()
    for line in (
        "stop_s = 3.0  # --stop-s",
        'log_level = "debug"  # KVEVENTS_LOG_LEVEL',
        f"host_bytes = 2097152  # {path}",
        'dialect = "vllm"  # default',
        "# snapshot is not set",
    ):
        assert line in lines
    assert set(tomllib.loads(printed)) < set(ServeConfig.__struct_fields__)
