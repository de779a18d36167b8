"""Files of keys: what they may hold, and who may read and write them."""

import os
from pathlib import Path

import pytest
import zmq

from kvevents_service.curve import AllowedKeys, ClientKeys, public_key, salt, secret_key
from kvevents_service.errors import ConfigError

PUBLIC, SECRET = zmq.curve_keypair()
OTHER, _ = zmq.curve_keypair()


def file(path: Path, content: bytes, mode: int = 0o600) -> str:
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


def test_a_secret_file_is_the_key_and_comments(tmp_path: Path) -> None:
    path = file(tmp_path / "k", b"# public: " + PUBLIC + b"\n\n" + SECRET + b"\n")
    assert secret_key(path, "s") == SECRET


def test_a_group_may_read_a_secret_as_in_kubernetes(tmp_path: Path) -> None:
    assert secret_key(file(tmp_path / "k", SECRET, 0o440), "s") == SECRET


@pytest.mark.parametrize("mode", [0o604, 0o606, 0o620, 0o602])
def test_a_secret_that_others_can_touch_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match="chmod 600"):
        secret_key(file(tmp_path / "k", SECRET, mode), "s")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = file(tmp_path / "k", SECRET)
    os.chown(path, 12345, 0)
    with pytest.raises(ConfigError, match="only this user can write"):
        secret_key(path, "s")


CONTENTS = {
    "nothing": b"",
    "short": SECRET[:39],
    "two": SECRET + SECRET,
    "tildes": b"~" * 40,
    "percents": b"%" * 40,
    "no text": b"\xff" * 40,
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_what_is_no_key_is_refused_and_not_repeated(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ConfigError) as error:
        secret_key(file(tmp_path / "k", content), "curve_secret_file")
    assert error.value.setting == "curve_secret_file"
    assert SECRET.decode()[:20] not in str(error.value)


@pytest.mark.parametrize("path", ["/nowhere/at-all", "/dev/null", "/"])
def test_what_is_no_file_is_refused(path: str) -> None:
    with pytest.raises(ConfigError):
        secret_key(path, "s")


def test_allowed_keys_have_names_and_comments(tmp_path: Path) -> None:
    lines = b"# routers\n\n" + PUBLIC + b"  router 1, zone a\n#\n" + OTHER + b"\n"
    allowed = AllowedKeys(file(tmp_path / "a", lines, 0o644), "a")
    assert PUBLIC in allowed
    assert OTHER in allowed
    assert SECRET not in allowed
    assert repr(allowed) == f"<AllowedKeys 2 of {tmp_path}/a>"


def test_no_key_begins_with_the_letter_of_comments(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        public_key("#" + "0" * 39, "k")
    assert OTHER not in AllowedKeys(file(tmp_path / "a", b"#" + OTHER + b"\n" + PUBLIC), "a")


def test_the_list_is_read_again_when_it_changed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    allowed = AllowedKeys(file(path, PUBLIC), "a")
    os.replace(file(tmp_path / "new", OTHER), path)
    assert PUBLIC not in allowed
    assert OTHER in allowed
    path.unlink()
    assert OTHER in allowed
    assert allowed.fault is not None
    file(path, PUBLIC)
    assert PUBLIC in allowed
    assert allowed.fault is None


def test_a_salt_is_bytes_as_they_are(tmp_path: Path) -> None:
    assert salt(file(tmp_path / "s", b"\xff\x00" * 8 + b"\n"), "s", 16) == b"\xff\x00" * 8 + b"\n"


def test_no_secret_is_shown() -> None:
    keys = ClientKeys(SECRET, OTHER)
    assert SECRET.decode() not in repr(keys)
    assert keys.public == PUBLIC
    assert PUBLIC.decode() in repr(keys)
