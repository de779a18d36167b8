"""The engine protocol: what an engine and the sidecar say to each other on the Unix domain socket.

A frame is a 4-byte little-endian length followed by one msgpack array whose first element is the message's
tag (proto/SPEC.md). Hashes, token ids and block ids travel packed: `block_hashes` is n x hash_bytes bytes,
`token_ids` and `block_ids` are little-endian int32. A message costs one object, never one per block.

A newer peer may append elements to a message; an older one ignores them (msgspec array structs do).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 32 * 1024 * 1024
MAX_HELLO_BYTES = 1024 * 1024
LENGTH_BYTES = 4
MAX_STEP_ITEMS = 65536
"""Offers of one step, requests that ended in it, and requests preempted in it."""


class GroupSpec(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One KV cache group. `block_size` is in tokens as stored; `sliding_window` in tokens or None.

    `main`: the one that routers are told of which know one group only. If no group is, the first cacheable one of a
    prefix kind will be.
    """

    index: int
    kind: str
    block_size: int
    sliding_window: int | None = None
    cacheable: bool = True
    main: bool = False


class CudaHandle(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An allocation of GPU memory: its IPC handle (64 bytes), its device's UUID (16 bytes) and its size.

    The memory starts `offset_bytes` behind the start of the allocation.
    """

    handle: bytes
    device: bytes
    base_bytes: int
    offset_bytes: int = 0


class Memory(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One shared mapping. Without `shm_name` its descriptor rides on the hello frame (SCM_RIGHTS), in order.

    With `cuda` it is on a GPU, and has neither. All memory of a rank is of one kind, and on one GPU.
    """

    size_bytes: int
    shm_name: str | None = None
    cuda: CudaHandle | None = None


class Region(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where one layer keeps its blocks: block i is `block_bytes` bytes at offset + i * stride of `memory`."""

    name: str
    memory: int
    offset_bytes: int
    block_bytes: int
    stride_bytes: int
    blocks: int


class InnerHash(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A place inside a block where a prefix may end: after `units` whole hash units of block `block` of an offer.

    `block_hash` is of the hash unit that ends there, `parent` of the one before it; `extra_keys` are the unit's.
    """

    block: int
    units: int
    block_hash: bytes
    parent: bytes | None = None
    extra_keys: tuple[Any, ...] | None = None


class Offer(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Consecutive finished blocks of one request and group, in chain order, ready to be copied.

    n = len(block_hashes) / hash_bytes blocks; token_ids holds n * block_size int32, block_ids n int32.
    `parent` is the hash of the block before the first one, None at the start of a prompt.
    `extra_keys`, if given, has one entry per block (None where a block has none).
    `inner` names prefixes that end inside a block. One more block id than hashes: the last block is a tail, filled
    up to its one inner hash, and token_ids goes on to there.
    """

    request_id: str
    group: int
    block_hashes: bytes
    token_ids: bytes
    block_ids: bytes
    parent: bytes | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    inner: list[InnerHash] | None = None


class Hello(msgspec.Struct, array_like=True, tag="hello", frozen=True, gc=False):
    """First frame of a session. `role` is "engine" (offers, looks up, loads), "worker" (brings the memory of one
    rank of the engine named `engine_id`, and inspects) or "observer" (inspects).

    `ranks` is how many ranks hold the model's KV memory; an engine and its workers say the same number. `rank` is
    the worker's own. An engine of several ranks brings no memory itself.
    `hash_tokens` is the number of tokens a hash unit has; 0: the block size of the first cacheable group.
    `namespace` names everything that must agree for KV bytes to be interchangeable (model, weights revision,
    dtype, layout, hash seed). Blocks are never shared across namespaces.
    `events` are IPC handles (64 bytes) of CUDA events, used in turns: see `Mark`.
    """

    protocol: int
    role: str
    engine_id: str
    namespace: str = ""
    hash_bytes: int = 32
    groups: list[GroupSpec] = []
    memories: list[Memory] = []
    regions: list[Region] = []
    hash_tokens: int = 0
    ranks: int = 1
    rank: int = 0
    events: list[bytes] = []


class Step(msgspec.Struct, array_like=True, tag="step", frozen=True, gc=False):
    """One scheduler step: newly confirmed blocks, and requests that ended or were preempted in it.

    The engine keeps every offered block unchanged until the `StepDone` with this id, or EOF.
    `mark`: the copies wait until every rank has said that it has reached it.
    """

    step_id: int
    offers: Annotated[list[Offer], msgspec.Meta(max_length=MAX_STEP_ITEMS)]
    finished: Annotated[list[str], msgspec.Meta(max_length=MAX_STEP_ITEMS)] = []
    preempted: Annotated[list[str], msgspec.Meta(max_length=MAX_STEP_ITEMS)] = []
    mark: int | None = None


class Mark(msgspec.Struct, array_like=True, tag="mark", frozen=True, gc=False):
    """What this rank's blocks of marks up to `number` need has been submitted to its device.

    Event `number` modulo the hello's count of events was recorded behind it, on the stream of all of them, before
    this was sent. Numbers rise. Without events the bytes are written.
    """

    number: int


class Lookup(msgspec.Struct, array_like=True, tag="lookup", frozen=True, gc=False):
    """How much of this prompt can be loaded? A hit is pinned for `lease_s` seconds.

    `block_hashes` are those of consecutive hash units from token `start_tokens` on: what is before it is in the
    engine already. `fine`: the hit may end at any hash unit, inside a block.
    """

    call_id: int
    request_id: str
    block_hashes: bytes
    lease_s: float = 10.0
    start_tokens: int = 0
    fine: bool = False


class Load(msgspec.Struct, array_like=True, tag="load", frozen=True, gc=False):
    """Copy the first `units` hash units of a leased hit into engine blocks; ends the lease.

    `block_ids` holds, for each cacheable group in order, the int32 ids of the blocks that a prefix of this length
    needs in that group (`core.groups.needed_blocks`; proto/SPEC.md has the rule). Where every group needs every
    block, `units` may be None: the number of ids says it. `mark`: as in a step.
    """

    load_id: int
    request_id: str
    lease_id: int
    block_ids: bytes
    units: int | None = None
    mark: int | None = None


class Release(msgspec.Struct, array_like=True, tag="release", frozen=True, gc=False):
    """The engine will not load this hit."""

    lease_id: int


class Reset(msgspec.Struct, array_like=True, tag="reset", frozen=True, gc=False):
    """Forget every stored block (weights changed, prefix cache reset)."""

    call_id: int


class Inspect(msgspec.Struct, array_like=True, tag="inspect", frozen=True, gc=False):
    """Ask for counters and, if `residents`, for the resident set."""

    call_id: int
    residents: bool = False


class Welcome(msgspec.Struct, array_like=True, tag="welcome", frozen=True, gc=False):
    """The session stands. A new `boot_id` means a new sidecar: everything known of the old one is void.

    `capacity_blocks` and `block_bytes` (of all ranks together) are the tier's: 0 as long as it has no size, because
    no engine has had all its ranks yet. `board_bytes`: of the name board, whose descriptor rides on this; 0: none.
    """

    protocol: int
    boot_id: str
    session_id: int
    capacity_blocks: int
    block_bytes: int
    board_bytes: int = 0


class StepDone(msgspec.Struct, array_like=True, tag="step_done", frozen=True, gc=False):
    """No copy of this step touches engine memory any more. Counts are blocks."""

    step_id: int
    stored: int
    known: int
    declined: int


class Hit(msgspec.Struct, array_like=True, tag="hit", frozen=True, gc=False):
    """Answer to a lookup: `blocks` leading hash units are pinned under `lease_id` (None when blocks is 0)."""

    call_id: int
    blocks: int
    lease_id: int | None = None


class Loaded(msgspec.Struct, array_like=True, tag="loaded", frozen=True, gc=False):
    """The load has ended: all destinations hold the right bytes, for `blocks` hash units; with 0, none does."""

    load_id: int
    blocks: int


class ResetDone(msgspec.Struct, array_like=True, tag="reset_done", frozen=True, gc=False):
    """Answer to a reset: so many blocks were removed."""

    call_id: int
    removed: int


class Residents(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Resident blocks of one tier and group: `hash_bytes` last bytes of each hash, packed, in no promised order."""

    medium: str
    group: int
    block_hashes: bytes


class Inspected(msgspec.Struct, array_like=True, tag="inspected", frozen=True, gc=False):
    """Answer to an inspect. The next event batch takes number `next_seq`; `hash_bytes` is of `residents`."""

    call_id: int
    next_seq: int
    hash_bytes: int
    stats: dict[str, int]
    residents: list[Residents] = []


class Error(msgspec.Struct, array_like=True, tag="error", frozen=True, gc=False):
    """A message was refused. `call_id` is the refused message's id where it could be read."""

    call_id: int | None
    code: str
    field: str
    expected: str


ClientMessage = Hello | Step | Mark | Lookup | Load | Release | Reset | Inspect
SidecarMessage = Welcome | StepDone | Hit | Loaded | ResetDone | Inspected | Error
