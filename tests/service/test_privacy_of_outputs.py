"""A hiding output beside an open one: the same stream under other names, live, replayed and as a snapshot."""

import asyncio
import re
from pathlib import Path

import pytest

from kvevents_service.config import OutputConfig, ServeConfig
from kvevents_service.core.privacy import key_of, mapped
from kvevents_service.core.residency import key64
from kvevents_service.errors import ConfigError
from kvevents_service.service.app import started
from kvevents_service.settings import load_config
from kvevents_service.subscriber import Batch, Source, Subscriber
from kvevents_service.testing import make_chain
from kvevents_service.wire.events import BlockRemoved, BlockStored

DEADLINE_S = 20.0
FREE = "tcp://127.0.0.1:0"
SALT = bytes(range(32))
CHAIN = make_chain(range(40, 72), 4)
LATER = make_chain(range(500, 516), 4)


@pytest.fixture
def salt_file(tmp_path: Path) -> Path:
    path = tmp_path / "salt"
    path.write_bytes(SALT)
    path.chmod(0o600)
    return path


async def batches(source: Source, last: int) -> list[Batch]:
    """Everything up to number `last`."""
    told: list[Batch] = []
    async with asyncio.timeout(DEADLINE_S), Subscriber(source) as subscriber:
        async for item in subscriber:
            if isinstance(item, Batch):
                told.append(item)
                if item.seq >= last:
                    return told
    raise AssertionError


def names(told: list[Batch]) -> list[tuple[str, list[int], int | None]]:
    """Every store and removal by its hashes."""
    return [
        (type(event).__name__, event.block_hashes, getattr(event, "parent_block_hash", None))
        for batch in told
        for event in batch.batch.events
        if isinstance(event, BlockStored | BlockRemoved)
    ]


async def test_history_live_and_snapshot_say_the_same_under_other_names(
    tmp_path: Path, engine, salt_file: Path
) -> None:
    hiding = OutputConfig(FREE, FREE, FREE, redact_tokens=True, hash_salt_file=str(salt_file))
    config = ServeConfig(
        str(tmp_path / "run" / "engine.sock"),
        host_bytes=10 * 128,  # ten blocks: the last stores evict
        outputs=(OutputConfig(FREE, FREE), hiding),
        heartbeat_s=0.0,
    )
    async with started(config) as service, asyncio.TaskGroup() as group:
        tasks = [group.create_task(part) for part in service.parts()]
        mini = await asyncio.to_thread(engine)
        await asyncio.to_thread(mini.store, CHAIN, list(range(8)))
        await asyncio.to_thread(mini.store, LATER, list(range(8, 12)))
        open_to_all, hidden = service.ready.outputs
        last = service.publisher.journal.next_seq - 1
        plain = await batches(Source(open_to_all.pub, open_to_all.replay), last)
        secret = await batches(Source(hidden.pub, hidden.replay), last)
        (state,) = await batches(Source(hidden.pub, snapshot=hidden.snapshot), last)
        for task in tasks:
            task.cancel()
    outward = {key64(name): key64(mapped(name, key_of(SALT))) for name in (*CHAIN.hashes, *LATER.hashes)}
    assert {kind for kind, _, _ in names(plain)} == {"BlockStored", "BlockRemoved"}
    assert names(secret) == [
        (kind, [outward[name] for name in hashes], None if parent is None else outward[parent])
        for kind, hashes, parent in names(plain)
    ]
    resident = set()
    for kind, hashes, _ in names(plain):
        resident = resident | set(hashes) if kind == "BlockStored" else resident - set(hashes)
    assert {name for _, hashes, _ in names([state]) for name in hashes} == {outward[name] for name in resident}
    for told in (*secret, state):
        stores = [event for event in told.batch.events if isinstance(event, BlockStored)]
        assert all(event.token_ids == [] and event.extra_keys is None for event in stores)


@pytest.mark.parametrize("open_too", [False, True])
async def test_operators_see_the_names_that_readers_do(
    tmp_path: Path, engine, salt_file: Path, open_too: bool
) -> None:
    hiding = OutputConfig(FREE, hash_salt_file=str(salt_file))
    outputs = (hiding, OutputConfig(FREE)) if open_too else (hiding, hiding)
    config = ServeConfig(
        str(tmp_path / "run" / "engine.sock"), host_bytes=10 * 128, outputs=outputs, admin=FREE[6:]
    )
    async with started(config) as service, asyncio.TaskGroup() as group:
        tasks = [group.create_task(part) for part in service.parts()]
        mini = await asyncio.to_thread(engine)
        await asyncio.to_thread(mini.store, CHAIN, list(range(8)))
        (told,) = service.publisher.tally.latest()
        for task in tasks:
            task.cancel()
    ends = CHAIN.hashes[0], CHAIN.hashes[-1]
    names = ends if open_too else [mapped(name, key_of(SALT)) for name in ends]
    assert [told.first, told.last] == [name[-8:-4].hex() for name in names]


@pytest.mark.parametrize("dialect", ["dynamo", "llm-d", "vllm-router", "aibrix", "sglang"])
def test_a_dialect_whose_readers_need_tokens_cannot_hide_them(dialect: str) -> None:
    with pytest.raises(ConfigError, match="find prompts by token ids") as error:
        load_config(None, {"dialect": dialect, "redact_tokens": True})
    assert error.value.setting == "redact_tokens"


def test_a_dialect_whose_readers_compute_hashes_cannot_map_them() -> None:
    with pytest.raises(ConfigError, match="compute the engine's hashes") as error:
        load_config(None, {"dialect": "mooncake", "hash_salt_file": "salt"})
    assert error.value.setting == "hash_salt_file"


@pytest.mark.parametrize("name", ["curve_secret_file", "curve_allowed_keys_file"])
def test_one_of_the_two_curve_files_is_not_enough(name: str) -> None:
    other = {"curve_secret_file": "curve_allowed_keys_file"}.get(name, "curve_secret_file")
    with pytest.raises(ConfigError) as error:
        load_config(None, {name: "file"})
    assert error.value.setting == other


def test_a_remote_address_needs_keys_or_a_word() -> None:
    remote = {"pub": "tcp://0.0.0.0:5557", "replay": "tcp://0.0.0.0:5558"}
    with pytest.raises(ConfigError, match=re.escape("a loopback address, CURVE keys, or --allow-remote")):
        load_config(None, remote)
    keyed = load_config(None, remote | {"curve_secret_file": "a", "curve_allowed_keys_file": "b"})
    assert keyed.event_outputs[0].encrypted


def test_a_fault_of_one_of_several_outputs_is_named_with_its_place() -> None:
    tables = [
        {"pub": "tcp://127.0.0.1:1"},
        {"pub": "tcp://127.0.0.1:2", "dialect": "dynamo", "redact_tokens": True},
    ]
    with pytest.raises(ConfigError) as error:
        load_config(None, {"outputs": tables})
    assert error.value.setting == "outputs[1].redact_tokens"


@pytest.mark.parametrize("length", [0, 15])
async def test_a_short_salt_is_refused(run, tmp_path: Path, length: int) -> None:
    path = tmp_path / "salt"
    path.write_bytes(bytes(length))
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="at least 16 random bytes"):
        async with run(hash_salt_file=str(path)):
            pass
