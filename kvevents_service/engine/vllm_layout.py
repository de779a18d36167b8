"""vLLM's cache configuration said in our terms: groups, and where every block's bytes are.

Read from `vllm.v1.kv_cache_interface` of 0.32 and 0.33 by attribute: nothing of vLLM is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from kvevents_service.core.groups import CHUNK_KIND, check_groups
from kvevents_service.errors import ConfigError, ControlError
from kvevents_service.wire.control import GroupSpec, Region

SCRATCH_KIND = "full_attention"
"""What a group that is never stored is called: its kind is of no account, and may be one that we do not know."""


class CacheConfig(Protocol):
    """The part of `KVCacheConfig` that is read."""

    num_blocks: int
    kv_cache_tensors: Sequence[Any]
    kv_cache_groups: Sequence[Any]

    @property
    def prefix_cacheable_group_ids(self) -> tuple[int, ...]: ...


class SpecReader(NamedTuple):
    """vLLM's own functions that tell a spec's kind, its window, and the tokens that one of its blocks spans."""

    kind: Callable[[Any], str]
    window: Callable[[Any], int | None]
    block_size: Callable[[Any], int]


def groups_of(config: CacheConfig, hash_tokens: int, reader: SpecReader) -> tuple[GroupSpec, ...]:
    """All groups in order. ConfigError if they cannot be served."""
    stored = set(config.prefix_cacheable_group_ids)
    groups = [
        _group(index, each.kv_cache_spec, index in stored, reader)
        for index, each in enumerate(config.kv_cache_groups)
    ]
    try:
        return check_groups(groups, hash_tokens)
    except ControlError as error:
        raise ConfigError(f"the model's KV cache: {error.field}", error.expected) from error


def _group(index: int, spec: Any, cacheable: bool, reader: SpecReader) -> GroupSpec:
    if not cacheable:
        return GroupSpec(index, SCRATCH_KIND, reader.block_size(spec), cacheable=False)
    kind = reader.kind(spec)
    window = spec.attention_chunk_size if kind == CHUNK_KIND else reader.window(spec)
    return GroupSpec(index, kind, reader.block_size(spec), window)


class Place(NamedTuple):
    """Blocks of one layer, or of several that lie block by block: block i is at offset + i * block_bytes."""

    name: str
    storage: Any
    offset_bytes: int
    block_bytes: int
    blocks: int

    def region(self, memory: int) -> Region:
        return Region(self.name, memory, self.offset_bytes, self.block_bytes, self.block_bytes, self.blocks)


def places_of(config: CacheConfig, caches: Mapping[str, Any]) -> list[Place]:
    """Every byte of every block, each once. `caches`: a layer's tensor, or its tensors, by the layer's name."""
    places: dict[tuple[int, int, int], Place] = {}
    for tensor in config.kv_cache_tensors:
        layer = next((name for name in tensor.layers if name in caches), None)
        if layer is None:
            continue
        if tensor.host_resident:
            raise ConfigError("the model's KV cache", f"to lie on the device, unlike that of layer {layer}")
        for place in _places(tensor, _storage(caches[layer]), config.num_blocks):
            _check_inside(place)
            key = (place.storage.data_ptr(), place.offset_bytes, place.block_bytes)
            places.setdefault(key, place)
    if not places:
        raise ConfigError("the model's KV cache", "at least one layer with a KV cache")
    return list(places.values())


def _places(tensor: Any, storage: Any, blocks: int) -> Iterator[Place]:
    """Layer by layer if a layer's blocks lie together; else one place for all that lies between two blocks."""
    span = blocks * tensor.block_stride
    if tensor.layer_stride < span:
        yield Place(tensor.layers[0], storage, 0, tensor.block_stride, blocks)
        return
    for number, layer in enumerate(tensor.layers):
        for part in range(tensor.layer_stride // span):
            offset = tensor.offset + number * tensor.layer_stride + part * span
            yield Place(f"{layer}.{part}" if part else layer, storage, offset, tensor.block_stride, blocks)


def _storage(cache: Any) -> Any:
    """What is under a tensor. A layer with several kinds of state has a list of tensors over one storage."""
    return (cache[0] if isinstance(cache, list | tuple) else cache).untyped_storage()


def _check_inside(place: Place) -> None:
    end = place.offset_bytes + place.blocks * place.block_bytes
    if end > place.storage.nbytes():
        raise ConfigError("the model's KV cache", f"{end} bytes under layer {place.name}, as its layout says")
