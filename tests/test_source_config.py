"""Settings of sources: ranges of ranks, and what is wrong with a table."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvevents_service.config import ServeConfig
from kvevents_service.errors import ConfigError
from kvevents_service.service.relay_app import by_rank
from kvevents_service.settings import load_config
from kvevents_service.source_config import SourceConfig

E, R = "tcp://10.0.0.7:5557", "tcp://10.0.0.7:6557"


def test_a_range_of_ranks_is_a_port_each_as_vllm_numbers_them() -> None:
    expanded = SourceConfig(E, R, dp_rank="2-3", model="m").expanded()
    assert [(rank, one.endpoint, one.replay, one.dp_rank, one.model) for rank, one in expanded] == [
        (2, "tcp://10.0.0.7:5559", "tcp://10.0.0.7:6559", 2, "m"),
        (3, "tcp://10.0.0.7:5560", "tcp://10.0.0.7:6560", 3, "m"),
    ]
    assert [one.record for _, one in SourceConfig(E, dp_rank="0-1", record="f").expanded()] == ["f.0", "f.1"]


def test_one_rank_is_where_it_was_said_to_be() -> None:
    assert SourceConfig(E, R, dp_rank=3).expanded() == [(3, SourceConfig(E, R, dp_rank=3))]


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"endpoint": "http://x"}, "endpoint"),
        ({"replay": "10.0.0.7:5558"}, "replay"),
        ({"endpoint": "ipc:///run/x", "dp_rank": "0-1"}, "endpoint"),
        ({"endpoint": "tcp://h:65535", "dp_rank": "0-1"}, "endpoint"),
        ({"replay": "ipc:///run/x", "dp_rank": "0-1"}, "replay"),
        ({"dp_rank": -1}, "dp_rank"),
        ({"dp_rank": "3-2"}, "dp_rank"),
        ({"dp_rank": "0-1024"}, "dp_rank"),
        ({"dp_rank": "all"}, "dp_rank"),
        ({"engine": "other"}, "engine"),
        ({"block_size": -1}, "block_size"),
        ({"stale_after_s": 0.0}, "stale_after_s"),
        ({"stale_after_s": float("nan")}, "stale_after_s"),
        ({"topic": "x" * 513}, "topic"),
        ({"endpoint": ""}, "endpoint"),
        ({"input": "f"}, "endpoint"),
        ({"endpoint": "", "input": "f", "record": "g"}, "record"),
        ({"endpoint": "", "input": "f", "dp_rank": "0-1"}, "dp_rank"),
        ({"redact": True}, "redact"),
        ({"speed": 0.0}, "speed"),
    ],
)
def test_what_cannot_work_is_named(settings: dict[str, object], setting: str) -> None:
    with pytest.raises(ConfigError) as raised:
        SourceConfig(**({"endpoint": E} | settings))  # type: ignore[arg-type]
    assert raised.value.setting == setting


def test_tables_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "relay.toml"
    path.write_text(f'[[sources]]\nendpoint = "{E}"\ndp_rank = "0-1"\n[[sources]]\nendpoint = "{R}"\ndp_rank = 2\n')
    assert {rank: one.endpoint[-4:] for rank, one in load_config(path, {}).ranked_sources().items()} == {
        0: "5557",
        1: "5558",
        2: "6557",
    }


@pytest.mark.parametrize(
    ("tables", "setting"),
    [
        ([{"endpoint": E}, {"endpoint": "x"}], "sources[1].endpoint"),
        ([{"endpoint": E}, {"endpoint": R}], "sources[1].dp_rank"),
        ([{"endpoint": E, "dp_rank": "0-3"}, {"endpoint": R, "dp_rank": 3}], "sources[1].dp_rank"),
    ],
)
def test_the_table_is_named(tables: list[dict[str, object]], setting: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(None, {"sources": tables})
    assert raised.value.setting == setting


def test_each_rank_has_outputs_of_its_own() -> None:
    config = ServeConfig(
        pub="tcp://127.0.0.1:5657", replay="tcp://127.0.0.1:5757", sources=(SourceConfig(E, dp_rank="4-5"),)
    )
    ranks = by_rank(config)
    outputs = {rank: settings.event_outputs[0] for rank, (settings, _) in ranks.items()}
    assert {rank: (one.pub[-4:], (one.replay or "")[-4:], one.dp_rank) for rank, one in outputs.items()} == {
        4: ("5657", "5757", 4),
        5: ("5658", "5758", 5),
    }


def test_ports_of_two_ranks_may_not_meet() -> None:
    config = ServeConfig(
        pub="tcp://127.0.0.1:5657", replay="tcp://127.0.0.1:5658", sources=(SourceConfig(E, dp_rank="0-1"),)
    )
    with pytest.raises(ConfigError, match="5658"):
        by_rank(config)
