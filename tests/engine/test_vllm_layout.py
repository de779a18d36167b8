"""vLLM's cache configuration: groups, and where the bytes of every block are."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvevents_service.engine.vllm_layout import SpecReader, groups_of, places_of
from kvevents_service.errors import ConfigError
from kvevents_service.wire.control import GroupSpec

READER = SpecReader(lambda spec: spec.kind, lambda spec: spec.window, lambda spec: spec.block_size)


def spec(kind: str, block_size: int = 16, window: int | None = None, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(kind=kind, block_size=block_size, window=window, **more)


def config(*specs: SimpleNamespace, stored: tuple[int, ...] = (0,), **more: Any) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=each) for each in specs]
    return SimpleNamespace(kv_cache_groups=groups, prefix_cacheable_group_ids=stored, **more)


def test_groups_keep_their_order_and_kind() -> None:
    chunked = spec("chunked_local_attention", attention_chunk_size=64)
    made = groups_of(
        config(spec("full_attention"), spec("sliding_window", window=32), chunked, stored=(0, 1, 2)), 16, READER
    )
    assert made == (
        GroupSpec(0, "full_attention", 16, main=True),
        GroupSpec(1, "sliding_window", 16, 32),
        GroupSpec(2, "chunked_local_attention", 16, 64),
    )


def test_a_group_that_is_never_stored_may_be_of_any_kind() -> None:
    made = groups_of(config(spec("full_attention"), spec("cross_attention", 48)), 16, READER)
    assert made[1] == GroupSpec(1, "full_attention", 48, cacheable=False)


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        ((spec("mamba"),), "a cacheable group of full_attention"),
        ((spec("unknown"),), "one of chunked_local_attention"),
        ((spec("full_attention", 24),), "a multiple of the hash unit"),
    ],
)
def test_a_model_that_cannot_be_served_is_one_clear_error(
    specs: tuple[SimpleNamespace, ...], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        groups_of(config(*specs), 16, READER)


# places

BLOCKS, PAGE = 4, 64


def tensor(
    layers: list[str], layer_stride: int, block_stride: int, offset: int = 0, **more: Any
) -> SimpleNamespace:
    plain = {"layers": layers, "layer_stride": layer_stride, "block_stride": block_stride, "offset": offset}
    return SimpleNamespace(**plain, **{"host_resident": False} | more)


def placed(*tensors: SimpleNamespace, caches: dict[str, Any]) -> list[tuple[str, int, int]]:
    places = places_of(config(kv_cache_tensors=tensors, num_blocks=BLOCKS), caches)
    return [(place.name, place.offset_bytes, place.block_bytes) for place in places]


def memory(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def test_layers_one_after_another_are_a_place_each() -> None:
    one = memory(2 * BLOCKS * PAGE + 8)
    layers = tensor(["a", "b"], BLOCKS * PAGE, PAGE, 8)
    assert placed(layers, caches={"a": one, "b": one}) == [("a", 8, PAGE), ("b", 8 + BLOCKS * PAGE, PAGE)]


def test_a_layer_in_several_parts_is_several_places() -> None:
    one = memory(2 * BLOCKS * PAGE)
    assert placed(tensor(["a"], 2 * BLOCKS * PAGE, PAGE), caches={"a": one}) == [
        ("a", 0, PAGE),
        ("a.1", BLOCKS * PAGE, PAGE),
    ]


def test_layers_block_by_block_are_one_place() -> None:
    one = memory(BLOCKS * 3 * PAGE)
    tensors = [tensor(["a", "b"], PAGE, 3 * PAGE), tensor(["c"], PAGE, 3 * PAGE, 2 * PAGE)]
    assert placed(*tensors, caches={"a": one, "b": one, "c": one}) == [("a", 0, 3 * PAGE)]


def test_groups_that_overlay_each_other_are_copied_once() -> None:
    one = memory(BLOCKS * PAGE)
    tensors = [tensor(["a"], BLOCKS * PAGE, PAGE), tensor(["b"], BLOCKS * PAGE, PAGE)]
    assert placed(*tensors, caches={"a": one, "b": one}) == [("a", 0, PAGE)]


def test_a_layer_with_several_kinds_of_state_has_one_storage() -> None:
    one = memory(BLOCKS * PAGE)
    assert placed(tensor(["a"], BLOCKS * PAGE, PAGE), caches={"a": [one[:8], one[8:]]}) == [("a", 0, PAGE)]


def test_a_layer_of_another_rank_is_left_out() -> None:
    one = memory(BLOCKS * PAGE)
    tensors = [tensor(["elsewhere"], BLOCKS * PAGE, PAGE), tensor(["here"], BLOCKS * PAGE, PAGE)]
    assert placed(*tensors, caches={"here": one}) == [("here", 0, PAGE)]


@pytest.mark.parametrize(
    ("layer", "size", "expected"),
    [
        (tensor(["a"], BLOCKS * PAGE, PAGE), BLOCKS * PAGE - 1, "256 bytes under layer a"),
        (tensor(["a"], BLOCKS * PAGE, PAGE, host_resident=True), BLOCKS * PAGE, "to lie on the device"),
        (tensor(["b"], BLOCKS * PAGE, PAGE), BLOCKS * PAGE, "at least one layer"),
    ],
)
def test_a_layout_that_cannot_be_is_one_clear_error(layer: SimpleNamespace, size: int, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        placed(layer, caches={"a": memory(size)})
