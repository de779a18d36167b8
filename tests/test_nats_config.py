"""Tables of [[nats]]: what cannot work is said at start, by its path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import zmq

from kvevents_service.cli.print_config import effective_toml
from kvevents_service.config import ServeConfig
from kvevents_service.errors import ConfigError
from kvevents_service.nats_config import NatsConfig
from kvevents_service.service.event_plane import bind_events
from kvevents_service.service.nats_broker import credentials
from kvevents_service.service.relay_app import by_rank
from kvevents_service.settings import load_config, load_settings

LOCAL = "nats://127.0.0.1:4222"
TABLE = {"servers": [LOCAL], "subject": "kv.m"}


def loaded(**table: object) -> NatsConfig:
    return load_config(None, {"nats": [{**TABLE, **table}]}).nats_outputs[0]


def test_names_in_a_subject_are_one_token_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_IP", "10.0.0.7")
    flags = {"labels": {"model": "org/Qwen2.5 7B"}, "nats": [{**TABLE, "subject": "kv.{model}.{pod}.{dp_rank}"}]}
    assert load_config(None, flags).nats_outputs[0].subject == "kv.org/Qwen2%2E5%207B.10%2E0%2E0%2E7.0"


@pytest.mark.parametrize(
    "subject", ["", "a..b", "a.", ".a", "a.*", "a.>", "a b", "a\x07", "$JS.API", "_INBOX.x", "a" * 513]
)
def test_a_subject_is_one_that_can_be_published_to(subject: str) -> None:
    with pytest.raises(ConfigError, match=r"^nats\[0\].subject: expected "):
        loaded(subject=subject)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"servers": []}, "servers: expected at least one"),
        ({"servers": ["tcp://127.0.0.1:1"]}, "servers: expected nats://"),
        ({"servers": ["nats://me:secret@127.0.0.1"]}, "servers: expected nats://"),
        ({"servers": ["nats://10.0.0.1:4222"]}, "servers: expected a loopback address, tls://, or --allow-remote"),
        ({"stream": "a.b"}, "stream: expected letters"),
        ({"dialect": "x"}, "dialect: expected one of"),
        ({"max_messages": 0}, "max_messages: expected a positive"),
        ({"snapshot_s": 3000}, "snapshot_s: expected seconds, at most 1800"),
        ({"password_file": "a", "credentials_file": "b"}, "password_file: expected nothing"),
        ({"ca_file": "a"}, "servers: expected tls://"),
        ({"dialect": "dynamo", "hash_salt_file": ""}, "hash_salt_file: expected a file"),
        ({"topic": "x"}, "topic: expected a known setting"),
    ],
)
def test_a_bad_table_names_its_key(table: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        loaded(**table)
    assert str(raised.value).startswith(f"nats[0].{message}")
    assert "secret" not in str(raised.value)


def test_two_outputs_do_not_share_a_subject() -> None:
    with pytest.raises(ConfigError, match=r"^nats\[1\].subject: expected another than kv.m"):
        load_config(None, {"nats": [TABLE, TABLE]})


def test_other_machines_are_reached_with_tls_or_when_told() -> None:
    assert loaded(servers=["tls://broker:4222"]).encrypted
    assert load_config(None, {"allow_remote": True, "nats": [{**TABLE, "servers": ["nats://broker"]}]}).nats


def test_each_rank_of_a_relay_has_a_subject_with_its_model() -> None:
    source = {"endpoint": "tcp://127.0.0.1:7000", "dp_rank": "2-3", "model": "m"}
    flags = {"pub": "tcp://127.0.0.1:0", "replay": None, "sources": [source]}
    config = load_config(None, {**flags, "nats": [{**TABLE, "subject": "kv.{model}.{dp_rank}"}]})
    found = {rank: settings.nats_outputs[0] for rank, (settings, _) in by_rank(config).items()}
    assert {rank: (one.subject, one.dp_rank) for rank, one in found.items()} == {2: ("kv.m.2", 2), 3: ("kv.m.3", 3)}
    with pytest.raises(ConfigError, match=r"^nats.subject: expected \{dp_rank\} in it"):
        by_rank(load_config(None, {**flags, "nats": [TABLE]}))


def test_printed_tables_give_the_same_again(tmp_path: Path) -> None:
    source = {"endpoint": "tcp://127.0.0.1:7000"}
    config = load_settings(None, {"nats": [{**TABLE, "max_bytes": "2MiB"}], "sources": [source]}, {})
    (tmp_path / "a.toml").write_text(effective_toml(config))
    again = load_config(tmp_path / "a.toml", {})
    assert (again.nats, again.sources) == (config.config.nats, config.config.sources)
    assert again.nats[0].max_bytes == 2 << 20


def test_without_nats_py_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nats", None)
    config = ServeConfig(pub="tcp://127.0.0.1:0", replay=None, nats=(NatsConfig(servers=(LOCAL,), subject="kv.m"),))
    context: zmq.Context = zmq.Context()
    try:
        with pytest.raises(ConfigError, match=r"pip install 'kvevents-service\[nats\]'"):
            bind_events(context, config, None)
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize(
    ("text", "options"), [("me:pa:ss\n", {"user": "me", "password": "pa:ss"}), ("s3cr3t", {"token": "s3cr3t"})]
)
def test_a_password_comes_from_a_file_and_is_not_shown(tmp_path: Path, text: str, options: dict[str, str]) -> None:
    path = tmp_path / "password"
    path.write_text(text)
    path.chmod(0o600)
    known = credentials(loaded(password_file=str(path)))
    assert known.options == options
    assert not [secret for secret in options.values() if secret != "me" and secret in repr(known)]
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=r"^password_file: expected a file that others cannot read"):
        credentials(loaded(password_file=str(path)))
