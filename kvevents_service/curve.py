"""CURVE keys (ZeroMQ RFC 26): who publishes, and which readers may connect. Keys are written in Z85, 40 letters.

A secret file holds one secret key; a file of allowed keys holds a public key a line, and after it, if you like,
whose it is. A line that begins with # is a comment. No key does: the letter stands for 84, and 84 * 85^4 > 2^32.
"""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path
from typing import Final, NamedTuple

import zmq
from zmq.utils import z85

from kvevents_service.errors import ConfigError

Z85_LETTERS: Final = 40
SECRET_COMMENT: Final = "# kvevents secret key"
"""A secret file as `kvevents keygen` makes it begins so: a secret key looks like a public one."""
MAX_FILE_BYTES: Final = 1 << 20
_WRITABLE: Final = stat.S_IWGRP | stat.S_IWOTH


class ClientKeys(NamedTuple):
    """What a reader connects with: its own secret key and the publisher's public one."""

    secret: bytes
    server: bytes

    def __repr__(self) -> str:
        return f"<ClientKeys of {self.public.decode()} for {self.server.decode()}>"

    @property
    def public(self) -> bytes:
        """What the publisher must allow."""
        return zmq.curve_public(self.secret)

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Let the socket speak only to the owner of `server`. Before it connects."""
        socket.curve_secretkey = self.secret
        socket.curve_publickey = self.public
        socket.curve_serverkey = self.server


class ServerKeys(NamedTuple):
    """What an endpoint is bound with."""

    secret: bytes
    allowed: AllowedKeys

    def __repr__(self) -> str:
        return f"<ServerKeys {zmq.curve_public(self.secret).decode()}, {self.allowed!r}>"


class AllowedKeys:
    """Public keys that may connect. The file is read again when it has changed; a bad one leaves the keys as they
    are, and `fault` says what is wrong with it."""

    def __init__(self, path: str, setting: str) -> None:
        """ConfigError if the file cannot be read now, or holds what is no key."""
        self.path = path
        self.fault: ConfigError | None = None
        self._setting = setting
        self._version = self._versions()
        self._names = _names(path, setting)

    def __repr__(self) -> str:
        return f"<AllowedKeys {len(self)} of {self.path}>"

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, key: bytes) -> bool:
        version = self._versions()
        if version != self._version:
            self._version = version
            self._read()
        return key in self._names

    def _read(self) -> None:
        try:
            self._names, self.fault = _names(self.path, self._setting), None
        except ConfigError as error:
            self.fault = error

    def _versions(self) -> tuple[int, ...]:
        try:
            status = os.stat(self.path)
        except OSError:
            return ()
        return status.st_ino, status.st_mtime_ns, status.st_size


def _names(path: str, setting: str) -> dict[bytes, str]:
    text = _text(path, setting, private=False)
    if text.startswith(SECRET_COMMENT):
        raise ConfigError(setting, f"a file of public keys, not {path}, which has a secret one")
    lines = [line.split(maxsplit=1) for line in text.splitlines()]
    told = [words for words in lines if words and words[0][0] != "#"]
    return {public_key(key, setting): "".join(name) for key, *name in told}


def public_key(text: str, setting: str) -> bytes:
    """A key in Z85. ConfigError names the setting, and never repeats what was there."""
    try:
        if len(text) == Z85_LETTERS and len(z85.decode(text)) == 32:
            return text.encode()
    except (ValueError, KeyError, struct.error):
        pass
    raise ConfigError(setting, f"keys of {Z85_LETTERS} letters, as `kvevents keygen` prints them")


def secret_key(path: str, setting: str) -> bytes:
    """The key in a secret file. ConfigError if others may read the file, or it holds something else."""
    words = [line.strip() for line in _text(path, setting, private=True).splitlines() if line[:1] != "#"]
    return public_key("".join(words), setting)


def salt(path: str, setting: str, least_bytes: int) -> bytes:
    """All bytes of a file that only its owner can read."""
    data = read_file(path, setting, private=True)
    if len(data) < least_bytes:
        raise ConfigError(setting, f"a file of at least {least_bytes} random bytes")
    return data


def _text(path: str, setting: str, *, private: bool) -> str:
    try:
        return read_file(path, setting, private=private).decode()
    except UnicodeDecodeError:
        raise ConfigError(setting, f"a file of keys, not {path}") from None


def read_file(path: str, setting: str, *, private: bool) -> bytes:
    """A file that only its owner can write, and if it is private, that others cannot read.

    Its group may read it: Kubernetes gives a secret to a container that way.
    """
    try:
        with Path(path).open("rb") as file:
            status = os.fstat(file.fileno())
            _check_owner(status, path, setting, private=private)
            return file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(setting, f"a file that can be read, not {path} ({error.strerror})") from error


def _check_owner(status: os.stat_result, path: str, setting: str, *, private: bool) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(setting, f"a file, not {path}")
    if status.st_uid not in (0, os.getuid()) or status.st_mode & _WRITABLE:
        raise ConfigError(setting, f"a file that only this user can write, not {path}: chmod 600")
    if private and status.st_mode & stat.S_IRWXO:
        raise ConfigError(setting, f"a file that others cannot read, not {path}: chmod 600")
