"""KV cache events as they stand on the wire, in the layout of vLLM 0.33 (`vllm/distributed/kv_events.py`).

A batch is a MessagePack array `[ts, [event, ...], data_parallel_rank]`, an event a map whose `type` is the
class name. Keys with a None default are left out when they are None; the others are always there, nil if
unknown. The order of the fields is the order of the keys and, in vLLM up to 0.23, of the positions: append
only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

BlockHash: TypeAlias = int | bytes
"""Name of one block of tokens and all before it. An int in [-2^63, 2^64) (vLLM: the low 64 bits, unsigned;
SGLang: signed) or the whole digest as bytes (vLLM: 32)."""


class _Event(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag=True):
    """What every event has: its class name under the key `type`."""


class BlockStored(_Event, frozen=True):
    """Consecutive blocks of one prompt that can be loaded from `medium` from now on.

    block_hashes: n hashes, in prompt order.
    parent_block_hash: the block before the first one; None at the start of a prompt.
    token_ids: the n * block_size tokens of the blocks. A list; many that came off the wire are `tokens.TokenIds`.
    block_size: tokens in one block.
    lora_id, lora_name: the adapter the blocks were computed with (lora_id is obsolete); None: the base model.
    medium: where the bytes are; None means GPU (see `media.canonical_medium`).
    extra_keys: n entries, what went into each hash beside tokens (adapter, image and offset, salt); None for
        nothing. Any MessagePack value; arrays are lists once decoded.
    group_idx: KV cache group; None means 0.
    kv_cache_spec_kind: "full_attention", "sliding_window", "mamba", ...
    kv_cache_spec_sliding_window: width in tokens, of the kinds that have one.
    locality: "LOCAL" or "REMOTE", seen from the publisher; None is unsaid.
    ownership: name of the secondary tier the blocks came from or went to.
    session_id: the session whose request caused the event.
    lookahead_token_ids: n lists, the tokens after each block that went into its hash.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[object] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class BlockRemoved(_Event, frozen=True):
    """Blocks that can no longer be loaded from `medium`, whatever their order. Fields as in `BlockStored`."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(_Event, frozen=True):
    """Every block of this publisher is gone, on every medium. One tier is cleared by removals instead."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True, gc=False, omit_defaults=True):
    """Events in the order they happened, sent as one payload.

    ts: seconds since the Unix epoch, at the publisher. From a peer it may be any float, NaN included.
    events: may be empty (a heartbeat).
    data_parallel_rank: whose cache it is; None where the publisher does not say.
    publisher_id: 16 bytes, only from publishers that answer snapshot requests; the fourth element.

    Encode with `codec.encode_batch`: msgspec itself never trims a trailing None from an array.
    """

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None
    publisher_id: bytes | None = None
