"""`kvevents keygen`, and the options of commands that connect to a publisher behind CURVE."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click
import zmq

from kvevents_service.cli.terminal import chat, discard_stdout, write
from kvevents_service.curve import SECRET_COMMENT, ClientKeys, public_key, secret_key
from kvevents_service.errors import ConfigError

EXIT_OK, EXIT_FAILED = 0, 1
DEFAULT_FILE = "kvevents.key"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_Command = TypeVar("_Command", bound=Callable[..., Any])


def with_keys(command: _Command) -> _Command:
    """The command with the two options that `client_keys` takes."""
    secret = click.option("--curve-secret-file", metavar="F", help="Our secret key, for a publisher behind CURVE.")
    server = click.option("--curve-server-key", metavar="K", help="The public key of that publisher.")
    return server(secret(command))


def client_keys(server: str | None, secret_file: str | None) -> ClientKeys | None:
    """The keys that the options name; None without them. ConfigError if one is missing or bad."""
    if server is None and secret_file is None:
        return None
    if server is None:
        raise ConfigError("--curve-server-key", "the publisher's public key, as --curve-secret-file is given")
    if secret_file is None:
        raise ConfigError("--curve-secret-file", "a file with our secret key, as --curve-server-key is given")
    return ClientKeys(secret_key(secret_file, "--curve-secret-file"), public_key(server, "--curve-server-key"))


@click.command(
    short_help="Make a pair of CURVE keys.",
    epilog="Exit codes: 0 fine, 1 the file cannot be made or read.",
)
@click.option("--out", metavar="FILE", default=DEFAULT_FILE, show_default=True, help="Where the secret key goes.")
@click.option("--show", is_flag=True, help="Make nothing; print the public key of the secret one in FILE.")
def keygen(out: str, show: bool) -> int:
    """Make a secret key, in a new file that only you can read, and print the public one.

    \b
    kvevents keygen --out sidecar.key                  # for serve --curve-secret-file
    kvevents keygen --out router.key >> routers.keys   # for serve --curve-allowed-keys-file
    """
    try:
        secret = secret_key(out, "--out") if show else _made(out)
        write(zmq.curve_public(secret).decode())
    except ConfigError as error:
        chat(f"kvevents keygen: {error}")
        return EXIT_FAILED
    except BrokenPipeError:
        discard_stdout()
    return EXIT_OK


def _made(path: str) -> bytes:
    """A new key in a new file. An older file is never replaced, a link never followed."""
    public, secret = zmq.curve_keypair()
    try:
        fd = os.open(path, _NEW, 0o600)
    except OSError as error:
        raise ConfigError("--out", f"a file that is not there yet, not {path} ({error.strerror})") from error
    with open(fd, "wb") as file:
        file.write(SECRET_COMMENT.encode() + b"; its public key: " + public + b"\n" + secret + b"\n")
    return secret
