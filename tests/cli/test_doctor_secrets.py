"""The doctor tries keys, salts and passwords as `serve` would."""

import importlib.util
import sys
from pathlib import Path

import pytest
import zmq

from kvevents_service.cli.doctor_secrets import check_secrets
from kvevents_service.cli.findings import OK, PROBLEM, WARNING
from kvevents_service.config import ServeConfig
from kvevents_service.errors import install
from kvevents_service.nats_config import NatsConfig

PUBLIC, SECRET = zmq.curve_keypair()
OTHER, _ = zmq.curve_keypair()


def file(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    path.chmod(0o600)
    return str(path)


@pytest.mark.parametrize(
    ("allowed", "level", "said"),
    [
        (b"# routers\n" + OTHER + b" a\n", OK, "1 key may connect to tcp://127.0.0.1:5557"),
        (b"# nobody yet\n", WARNING, "nobody can connect to tcp://127.0.0.1:5557: no key is in"),
        (b"", WARNING, "nobody can connect"),
        (SECRET, PROBLEM, "public keys: the secret one"),
        (b"# kvevents secret key; its public key: x\n" + OTHER, PROBLEM, "which has a secret one"),
        (None, PROBLEM, "Is a directory"),
    ],
    ids=["one", "comments", "empty", "the secret one", "one named secret", "a directory"],
)
def test_a_list_of_keys(tmp_path: Path, allowed: bytes | None, level: str, said: str) -> None:
    path = str(tmp_path) if allowed is None else file(tmp_path / "allowed", allowed)
    secret = file(tmp_path / "secret", SECRET)
    (found,) = check_secrets(ServeConfig(curve_secret_file=secret, curve_allowed_keys_file=path))
    assert (found.check, found.level, said in found.what) == ("keys", level, True), found
    assert SECRET.decode() not in str(found)


def test_a_salt_and_nothing_to_look_at(tmp_path: Path) -> None:
    assert not [*check_secrets(ServeConfig())]
    (good,) = check_secrets(ServeConfig(hash_salt_file=file(tmp_path / "salt", b"x" * 32)))
    (bad,) = check_secrets(ServeConfig(hash_salt_file=file(tmp_path / "short", b"x")))
    assert (good.level, bad.level) == (OK, PROBLEM)


@pytest.mark.skipif(importlib.util.find_spec("nats") is None, reason="nats-py is not installed (extra: nats)")
def test_a_broker(tmp_path: Path) -> None:
    broker = NatsConfig(servers=("nats://127.0.0.1:4222",), subject="kv.0")
    (good,) = check_secrets(ServeConfig(nats=(broker,)))
    password = NatsConfig(servers=broker.servers, subject="kv.1", password_file=str(tmp_path / "nowhere"))
    _, bad = check_secrets(ServeConfig(nats=(broker, password)))
    assert (good.level, bad.level, "password_file" in bad.what) == (OK, PROBLEM, True)


def test_a_broker_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nats", None)
    broker = NatsConfig(servers=("nats://127.0.0.1:4222",), subject="kv.0")
    (found,) = check_secrets(ServeConfig(nats=(broker,)))
    assert (found.check, found.level, found.remedy) == ("nats", PROBLEM, install("nats"))
    assert "nats-py is not installed" in found.what
