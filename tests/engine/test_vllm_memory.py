"""A storage is shared in place: whoever maps its descriptor sees what the engine's tensors see."""

import mmap
import os

import pytest
import torch

from kvevents_service.engine.vllm_layout import Place
from kvevents_service.engine.vllm_memory import share
from kvevents_service.errors import ConfigError

BLOCKS, PAGE = 4, 4096


def test_views_follow_their_storage_into_shared_memory() -> None:
    cache = torch.arange(2 * BLOCKS * PAGE, dtype=torch.int32).view(2, BLOCKS, PAGE)
    layer = cache[1]
    size = cache.untyped_storage().nbytes()
    places = [
        Place(name, each.untyped_storage(), at, PAGE, BLOCKS)
        for name, each, at in (("a", cache, 0), ("b", layer, 64))
    ]
    shared = share(places)
    assert len(shared.memories) == len(shared.fds) == 1
    assert shared.memories[0].size_bytes == size
    assert [(region.memory, region.offset_bytes) for region in shared.regions] == [(0, 0), (0, 64)]
    with mmap.mmap(os.dup(shared.fds[0]), size) as mapped:
        seen = torch.frombuffer(mapped, dtype=torch.int32).view(2, BLOCKS, PAGE)
        assert torch.equal(seen, cache)
        layer[2, 7] = -5
        assert seen[1, 2, 7] == -5
        seen[1, 3, 0] = -6
        assert layer[3, 0] == -6
        del seen


def test_two_storages_are_two_memories() -> None:
    places = [Place(name, torch.zeros(PAGE).untyped_storage(), 0, PAGE, 1) for name in "ab"]
    shared = share(places)
    assert [region.memory for region in shared.regions] == [0, 1]
    assert len(set(shared.fds)) == 2


def test_a_device_that_nobody_can_share_is_one_clear_error() -> None:
    storage = torch.zeros(4, device="meta").untyped_storage()
    with pytest.raises(ConfigError, match="not meta"):
        share([Place("a", storage, 0, 4, 4)])
