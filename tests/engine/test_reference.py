"""The reference engine's own parts: a trace is the same in every process, and its cache is honest."""

import subprocess
import sys
from importlib.resources import files

import pytest

from kvevents_service.engine.lazy import BlockRecord
from kvevents_service.engine.paged_cache import PagedCache
from kvevents_service.engine.spans import RequestView
from kvevents_service.engine.trace import chain_hashes, prompt_tokens, read_trace

TRACE = files("kvevents_service") / "data" / "conversation-200.jsonl"


def hashes(count: int) -> list[bytes]:
    return [bytes([n]) * 32 for n in range(1, count + 1)]


def test_equal_prefixes_of_the_trace_have_equal_tokens_and_hashes() -> None:
    first, second, *_ = read_trace(TRACE)  # type: ignore[arg-type]
    assert first.hash_ids[0] == second.hash_ids[0]
    one, other = prompt_tokens(first), prompt_tokens(second)
    assert len(one) == first.input_length
    assert one[:512] == other[:512]
    assert one[512:600] != other[512:600]
    assert chain_hashes(one, 16, [])[:32] == chain_hashes(other, 16, [])[:32]


@pytest.mark.parametrize("seed", ["0", "42"])
def test_hashes_do_not_depend_on_the_process(seed: str) -> None:
    code = (
        "from kvevents_service.engine.trace import *; t = derived_tokens(7, 64);"
        "print(b''.join(chain_hashes(t, 16, [])).hex())"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
    )
    from kvevents_service.engine.trace import derived_tokens

    assert printed.stdout.strip() == b"".join(chain_hashes(derived_tokens(7, 64), 16, [])).hex()


def test_repeated_text_has_distinct_hashes() -> None:
    from array import array

    assert len(set(chain_hashes(array("i", [1] * 64), 16, []))) == 4


def test_a_wrong_byte_anywhere_in_a_block_is_seen() -> None:
    cache = PagedCache(4, 2, 64)
    cache.fill([0, 1, 2], hashes(3))
    assert cache.corrupt([0, 1, 2], hashes(3)) == 0
    for byte in (0, 63, 64 * 4 + 3):
        original = cache.memory.map[byte]
        cache.memory.map[byte] = original ^ 1
        assert cache.corrupt([0, 1, 2], hashes(3)) == 1
        cache.memory.map[byte] = original
    assert cache.corrupt([1, 0], hashes(2)) == 2


def test_reused_blocks_are_poisoned_and_forgotten() -> None:
    cache = PagedCache(2, 1, 64)
    blocks = cache.allocate(2)
    cache.fill(blocks, hashes(2))
    records = [BlockRecord(RequestView("r", hashes(2), []), 0, number) for number in range(2)]
    cache.cache(blocks, hashes(2), records)
    cache.free(blocks)
    assert [cache.find(name) for name in hashes(2)] == blocks
    again = cache.allocate(1)
    assert again == blocks[:1]
    assert [cache.find(name) for name in hashes(2)] == [None, blocks[1]]
    assert [cache.describe(block) for block in blocks] == [None, records[1]]
    assert cache.corrupt(again, hashes(1)) == 1


def test_a_block_is_free_only_without_users() -> None:
    cache = PagedCache(2, 1, 64)
    (block,) = cache.allocate(1)
    cache.touch([block])
    cache.free([block])
    assert cache.free_blocks == 1
    cache.free([block])
    assert cache.free_blocks == 2


def test_the_free_queue_is_walked_in_the_order_of_reuse() -> None:
    cache = PagedCache(4, 1, 64)
    first, second = cache.allocate(2)
    cache.cache([second], hashes(1), [BlockRecord(RequestView("r", hashes(1), []), 0, 0)])
    cache.free([second, first])
    assert list(cache.free_after(None)) == [(2, None), (3, None), (second, hashes(1)[0]), (first, None)]
    assert list(cache.free_after(second)) == [(first, None)]
    cache.touch([second])
    assert list(cache.free_after(second)) == [(2, None), (3, None), (first, None)]
    assert cache.allocate(3) == [2, 3, first]
    assert (cache.free_blocks, cache.can_allocate(1)) == (0, False)
