"""`kvevents keygen`, and the commands that connect with what it makes."""

import asyncio
import os
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq
from click.testing import CliRunner, Result

from kvevents_service.cli import kvevents
from kvevents_service.config import ServeConfig
from kvevents_service.curve import secret_key
from kvevents_service.service.app import Service, started

FREE = "tcp://127.0.0.1:0"
DEADLINE_S = 60.0


def keygen(*arguments: str) -> Result:
    return CliRunner().invoke(kvevents, ["keygen", *arguments], standalone_mode=False)


def test_a_pair_is_a_private_file_and_a_printed_key(tmp_path: Path) -> None:
    path = tmp_path / "sidecar.key"
    before = os.umask(0)
    try:
        made = keygen("--out", str(path))
    finally:
        os.umask(before)
    assert made.return_value == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    secret = secret_key(str(path), "k")
    assert made.stdout == zmq.curve_public(secret).decode() + "\n"
    assert secret.decode() not in made.output
    assert keygen("--out", str(path), "--show").stdout == made.stdout


def test_an_older_key_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "k"
    path.write_text("precious")
    made = keygen("--out", str(path))
    assert made.return_value == 1
    assert "not there yet" in made.stderr
    assert path.read_text() == "precious"


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert keygen("--out", str(tmp_path / "link")).return_value == 1
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("command", ["tail", "snapshot"])
@pytest.mark.parametrize("option", ["--curve-server-key", "--curve-secret-file"])
def test_one_of_the_two_options_is_not_enough(command: str, option: str) -> None:
    result = CliRunner().invoke(kvevents, [command, "tcp://127.0.0.1:1", option, "x"], standalone_mode=False)
    assert result.return_value == 2
    assert "--curve-" in result.stderr


# against a sidecar


@asynccontextmanager
async def sidecar(tmp_path: Path) -> AsyncIterator[tuple[Service, str]]:
    """A sidecar that lets `router.key` in, and its public key."""
    public = keygen("--out", str(tmp_path / "sidecar.key")).stdout.strip()
    allowed = tmp_path / "routers.keys"
    allowed.write_text(keygen("--out", str(tmp_path / "router.key")).stdout)
    keygen("--out", str(tmp_path / "stranger.key"))
    config = ServeConfig(
        str(tmp_path / "run" / "engine.sock"),
        host_bytes=4096,
        pub=FREE,
        replay=FREE,
        snapshot=FREE,
        curve_secret_file=str(tmp_path / "sidecar.key"),
        curve_allowed_keys_file=str(allowed),
        heartbeat_s=0.1,
    )
    async with started(config) as service, asyncio.TaskGroup() as group:
        tasks = [group.create_task(part) for part in service.parts()]
        yield service, public
        for task in tasks:
            task.cancel()


async def command(*words: str) -> tuple[int | None, str, str]:
    """Exit code, stdout and stderr of a `kvevents` process."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvevents_service", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(DEADLINE_S):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_tail_and_snapshot_read_with_the_right_key(tmp_path: Path) -> None:
    async with sidecar(tmp_path) as (service, public):
        keys = ("--curve-server-key", public, "--curve-secret-file", str(tmp_path / "router.key"))
        code, out, err = await command("snapshot", service.ready.outputs[0].snapshot or "", *keys)
        assert (code, err) == (0, "")
        assert "0 blocks" in out
        code, _, err = await command("tail", service.ready.pub, "--wait", "0.05", *keys)
        assert "refused" not in err


async def test_a_stranger_is_told_why_and_at_once(tmp_path: Path) -> None:
    async with sidecar(tmp_path) as (service, public):
        keys = ("--curve-server-key", public, "--curve-secret-file", str(tmp_path / "stranger.key"))
        code, out, err = await command("snapshot", service.ready.outputs[0].snapshot or "", *keys)
        assert (code, out) == (1, "")
        assert "it does not allow our key" in err
        code, out, err = await command("tail", service.ready.pub, "--wait", "1", *keys)
        assert (code, out) == (1, "")
        assert "refused by" in err
        assert "it does not allow our key" in err


async def test_a_reader_without_keys_is_told_that_it_needs_them(tmp_path: Path) -> None:
    async with sidecar(tmp_path) as (service, _):
        code, out, err = await command("snapshot", service.ready.outputs[0].snapshot or "")
        assert (code, out) == (1, "")
        assert "it wants CURVE keys" in err
        code, out, err = await command("tail", service.ready.pub, "--wait", "1")
        assert (code, out) == (1, "")
        assert "it wants CURVE keys" in err
