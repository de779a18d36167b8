"""Settings are checked before anything starts; every error names the setting and what was expected."""

from pathlib import Path

import pytest

from kvevents_service.config import OutputConfig, ServeConfig
from kvevents_service.errors import ConfigError
from kvevents_service.settings import load_config


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"host_bytes": 0}, "host_bytes"),
        ({"host_bytes": -5}, "host_bytes"),
        ({"host_bytes": 1.5}, "host_bytes"),
        ({"host_bytes": "1G"}, "host_bytes"),
        ({"host_bytes": True}, "host_bytes"),
        ({"host_blocks": 0}, "host_blocks"),
        ({"host_blocks": 2.0}, "host_blocks"),
        ({"copy_threads": 0}, "copy_threads"),
        ({"copy_threads": 65}, "copy_threads"),
        ({"copy_threads": 1.5}, "copy_threads"),
        ({"host_hugetlb": 1}, "host_hugetlb"),
        ({"disk_bytes": 4096}, "disk_path"),
        ({"disk_blocks": 4}, "disk_path"),
        ({"disk_page_cache": True}, "disk_path"),
        ({"disk_keep": True}, "disk_path"),
        ({"disk_path": "d"}, "disk_bytes"),
        ({"disk_path": "", "disk_bytes": 4096}, "disk_path"),
        ({"disk_path": "d\0", "disk_bytes": 4096}, "disk_path"),
        ({"disk_path": 7, "disk_bytes": 4096}, "disk_path"),
        ({"disk_path": "d", "disk_bytes": 0}, "disk_bytes"),
        ({"disk_path": "d", "disk_bytes": -4096}, "disk_bytes"),
        ({"disk_path": "d", "disk_bytes": 4096.0}, "disk_bytes"),
        ({"disk_path": "d", "disk_bytes": True}, "disk_bytes"),
        ({"disk_path": "d", "disk_bytes": "4096"}, "disk_bytes"),
        ({"disk_path": "d", "disk_bytes": 4096, "disk_blocks": 0}, "disk_blocks"),
        ({"disk_path": "d", "disk_bytes": 4096, "disk_blocks": 1.5}, "disk_blocks"),
        ({"disk_path": "d", "disk_bytes": 4096, "host_bytes": -1}, "host_bytes"),
        ({"disk_path": "d", "disk_bytes": 4096, "host_blocks": 1}, "host_bytes"),
        ({"disk_path": "d", "disk_bytes": 4096, "host_bytes": 0, "host_blocks": 1}, "host_bytes"),
        ({"dp_rank": -1}, "dp_rank"),
        ({"pub": "127.0.0.1:5557"}, "pub"),
        ({"pub": "tcp://127.0.0.1"}, "pub"),
        ({"pub": "tcp://127.0.0.1:65536"}, "pub"),
        ({"pub": "tcp://::1:5557"}, "pub"),
        ({"pub": "tcp://0.0.0.0:5557"}, "pub"),
        ({"pub": "tcp://*:5557"}, "pub"),
        ({"replay": "tcp://10.0.0.1:5558"}, "replay"),
        ({"pub": "tcp://127.0.0.1:7", "replay": "tcp://127.0.0.1:7"}, "replay"),
        ({"engine_socket": ""}, "engine_socket"),
        ({"engine_socket": "/" + "x" * 120}, "engine_socket"),
        ({"stop_s": 0}, "stop_s"),
        ({"stop_s": float("nan")}, "stop_s"),
        ({"retained_batches": 0}, "retained_batches"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_setting_that_cannot_work_is_named(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, settings)
    assert error.value.setting == named
    assert error.value.expected


@pytest.mark.parametrize("value", ["4096.0", "true", "'4096'", "1e3", "'1G'", "'.5GiB'", "'0.3 B'"])
@pytest.mark.parametrize("setting", ["host_bytes", "disk_bytes", "host_blocks", "disk_blocks"])
def test_what_is_no_whole_number_in_a_file_is_named(tmp_path: Path, setting: str, value: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f"{setting} = {value}\n")
    with pytest.raises(ConfigError, match=r"expected a whole number") as error:
        load_config(path, {})
    assert error.value.setting == setting


@pytest.mark.parametrize(
    ("settings", "tiers"),
    [
        ({}, [("host", 1 << 30, None, None, False, False)]),
        ({"host_bytes": 5, "host_blocks": 2}, [("host", 5, 2, None, False, False)]),
        ({"disk_path": "d", "disk_bytes": 7}, [("disk", 7, None, "d", False, False)]),
        (
            {"disk_path": "d", "disk_bytes": 7, "disk_blocks": 3, "host_bytes": 0, "disk_page_cache": True},
            [("disk", 7, 3, "d", True, False)],
        ),
        (
            {"disk_path": "d", "disk_bytes": 7, "host_bytes": 5, "host_blocks": 2, "disk_keep": True},
            [("host", 5, 2, None, False, False), ("disk", 7, None, "d", False, True)],
        ),
    ],
)
def test_there_is_a_tier_of_each_kind_that_is_asked_for(
    settings: dict[str, object], tiers: list[tuple[object, ...]]
) -> None:
    config = load_config(None, settings)
    assert list(config.tiers) == tiers


def test_remote_addresses_must_be_asked_for() -> None:
    asked = load_config(None, {"pub": "tcp://0.0.0.0:5557", "allow_remote": True})
    assert asked.pub == "tcp://0.0.0.0:5557"


@pytest.mark.parametrize("local", ["tcp://127.0.0.1:0", "tcp://localhost:1", "tcp://[::1]:5557", "ipc:///tmp/x"])
def test_local_addresses_need_no_leave(local: str) -> None:
    assert ServeConfig(pub=local).pub == local


def test_flags_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('topic = "file"\ndp_rank = 3\n')
    config = load_config(path, {"topic": "flag", "dp_rank": None})
    assert (config.topic, config.dp_rank) == ("flag", 3)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("topic = ", "TOML"),
        ("topik = 'x'", r"^topik: expected a known setting; did you mean topic\? \(said by .*c.toml\)$"),
        (None, "readable file"),
        ("x = " + "[" * 10_000, "TOML"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str | None, named: str) -> None:
    path = tmp_path / "c.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=named):
        load_config(path, {})


# outputs


def test_the_top_level_describes_one_output() -> None:
    config = ServeConfig(pub="tcp://127.0.0.1:7", replay=None, dialect="dynamo", topic="t", dp_rank=2)
    assert config.event_outputs == [OutputConfig("tcp://127.0.0.1:7", None, None, "dynamo", "t", 2)]


def test_a_file_describes_any_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_IP", "10.0.0.7")
    path = tmp_path / "c.toml"
    path.write_text(
        """
        labels = { model = "org/m" }
        [[outputs]]
        pub = "tcp://127.0.0.1:5557"
        replay = "tcp://127.0.0.1:5558"
        snapshot = "tcp://127.0.0.1:5559"
        [[outputs]]
        pub = "tcp://127.0.0.1:5560"
        dialect = "llm-d"
        topic = "kv@{pod}@{model}"
        dp_rank = 1
        """
    )
    first, second = load_config(path, {}).event_outputs
    assert (first.dialect, first.snapshot) == ("vllm", "tcp://127.0.0.1:5559")
    assert second == OutputConfig("tcp://127.0.0.1:5560", None, None, "llm-d", "kv@10.0.0.7@org/m", 1)


@pytest.mark.parametrize(
    "port", ["tcp://127.0.0.1:5557", "tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://localhost:5557"]
)
def test_endpoints_that_overlap_are_refused(port: str) -> None:
    outputs = [{"pub": "tcp://127.0.0.1:5557"}, {"pub": "tcp://127.0.0.1:0", "replay": port}]
    with pytest.raises(
        ConfigError, match=r"outputs\[1\].replay: expected an endpoint other than outputs\[0\].pub's"
    ):
        load_config(None, {"outputs": outputs, "allow_remote": True})


@pytest.mark.parametrize(
    "port", ["tcp://127.0.0.1:5558", "tcp://127.0.0.2:5557", "ipc:///tmp/x", "tcp://127.0.0.1:0"]
)
def test_endpoints_that_differ_are_not(port: str) -> None:
    outputs = [{"pub": "tcp://127.0.0.1:5557"}, {"pub": "tcp://127.0.0.1:0", "replay": port}]
    assert len(load_config(None, {"outputs": outputs}).event_outputs) == 2


def test_each_wildcard_is_an_endpoint_of_its_own() -> None:
    assert ServeConfig(pub="ipc://*", replay="ipc://*").replay == "ipc://*"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"outputs": [{"pub": "tcp://127.0.0.1:1"}], "topic": "t"}, "topic"),
        ({"outputs": [{"pub": "tcp://127.0.0.1:1"}], "pub": "tcp://127.0.0.1:2"}, "pub"),
        ({"outputs": [{"replay": "tcp://127.0.0.1:1"}]}, r"^outputs\[0\].pub: expected a value"),
        ({"outputs": [{"pub": "tcp://127.0.0.1:1", "colour": 1}]}, r"^outputs\[0\].colour: "),
        ({"outputs": [{"pub": "tcp://127.0.0.1:1", "dialekt": 1}]}, "did you mean dialect"),
        ({"outputs": [{"pub": "ipc://a"}, {"pub": "ipc://b", "topic": "{x"}]}, r"^outputs\[1\].topic: "),
        ({"outputs": [{"pub": "ipc://a"}, {"pub": "ipc://b", "topic": "{nobody}"}]}, r"^outputs\[1\].topic: "),
        ({"outputs": [{"pub": "ipc://a"}, {"pub": "ipc://b", "topic": "x" * 513}]}, r"^outputs\[1\].topic: "),
        ({"outputs": [{"pub": "ipc://a"}, 3]}, r"^outputs\[1\]: expected a table, not a whole number"),
        ({"outputs": 3}, "^outputs: expected a list"),
        ({"labels": {"a": 1}}, r"^labels\.a: expected text"),
        ({"labels": 1}, "^labels: expected a table"),
        ({"host_byte": 1}, "^host_byte: .*did you mean host_bytes"),
        ({"admin": "9470"}, "^admin: expected a"),
        ({"admin": "127.0.0.1"}, "^admin: expected a port"),
        ({"admin": "0.0.0.0:9470"}, "^admin: expected a loopback address"),
        ({"admin": "http://127.0.0.1:1"}, "^admin: expected a host"),
        ({"log_format": "xml"}, "^log_format: expected one of text, json"),
        ({"outputs": [{"pub": "tcp://10.0.0.1:1"}]}, r"^outputs\[0\].pub: "),
        ({"outputs": [{"pub": "tcp://127.0.0.1:1", "dialect": "vlm"}]}, r"^outputs\[0\].dialect: "),
        (
            {"outputs": [{"pub": "tcp://127.0.0.1:1"}, {"pub": "ipc://a", "dp_rank": -1}]},
            r"^outputs\[1\].dp_rank: ",
        ),
        ({"outputs": [{"pub": "tcp://127.0.0.1:1", "dp_rank": "x"}]}, r"^outputs\[0\].dp_rank: "),
        ({"log_level": "loud"}, "log_level"),
        ({"dialect": "VLLM"}, "dialect"),
        ({"dialect": "dynamo", "snapshot": "tcp://127.0.0.1:9"}, "snapshot"),
        ({"snapshot": "tcp://127.0.0.1:5558"}, "snapshot"),
        ({"topic": "{nobody}"}, "topic"),
        ({"heartbeat_s": -1}, "heartbeat_s"),
        ({"heartbeat_s": float("nan")}, "heartbeat_s"),
        ({"heartbeat_s": 1e-9}, "heartbeat_s"),
        ({"dp_rank": 1 << 31}, "dp_rank"),
        ({"send_high_water_mark": 1 << 31}, "send_high_water_mark"),
        ({"pub": "tcp://127.0.0.1:\u00b2"}, "^pub"),
        ({"pub": "tcp://127.0.0.1:" + "9" * 5000}, "^pub"),
        ({"pub": "ipc:///tmp/\udcff"}, "^pub"),
        ({"pub": "ipc:///tmp/a\0b"}, "^pub"),
        ({"topic": "\udcff"}, "^topic"),
        ({"topic": "\u00fc" * 257}, "^topic"),
        ({"state_dir": ""}, "state_dir"),
        ({"state_dir": "a\0b"}, "state_dir"),
        ({"outputs": [{"pub": 1}]}, r"^outputs\[0\].pub"),
        ({"pub": "ipc:///tmp/x", "replay": "ipc:///tmp//./x"}, "replay"),
    ],
)
def test_an_output_that_cannot_work_is_named(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_config(None, settings)
