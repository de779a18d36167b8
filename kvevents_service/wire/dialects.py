"""Dialects: what one reader's program takes, as a declaration. No single stream serves every router.

`core.announce.encode` writes a batch in a dialect; `kvevents dialects` and the documentation print these tables.
Every dialect has the same sequence numbers: a batch of which nothing is let through is an empty batch.

Sources: proto/SPEC.md "Dialects" names, for each, the program and version whose reader was run or read.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

import msgspec

from kvevents_service.wire.hashes import HashForm
from kvevents_service.wire.media import MEDIUM_CPU, MEDIUM_EXTERNAL, MEDIUM_GPU, MEDIUM_STORAGE

STORED_KEYS: Final = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    *("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality"),
)
"""All that is ever said of stored blocks, in the order of the wire: a prefix of the fields of `BlockStored`."""
REMOVED_KEYS: Final = ("block_hashes", "medium", "group_idx", "locality")
"""All that is ever said of removed blocks: a prefix of the fields of `BlockRemoved`."""


class Layout(Enum):
    """How an event is laid out. ARRAY: the type first, then a position for each key."""

    MAP = "map"
    ARRAY = "array"


class Groups(Enum):
    """Which KV cache groups are let through. MAIN: the main one, said as if there were no others."""

    ALL = "all"
    MAIN = "main attention"


class Dialect(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """One way to say the same events. The batch is always an array `[float ts, events, int rank]`.

    name, readers: its name, and whom it is for.
    layout: events as maps or as arrays.
    hashes: the form of every hash.
    one_hash: an event for each block, instead of one for each run of blocks.
    stored, removed: the keys (or positions) that are always there, nil without a value.
    stored_if_set, removed_if_set: keys left out without a value; maps only. They follow the others.
    media: pairs of a medium and its name here; what is not listed is filtered out. None: every medium as it is.
    groups: which KV cache groups.
    inner: also the hashes within a block of several hash units.
    plain_extra_keys: extra keys reduced to the shapes that every reader takes.
    publisher_id: a fourth element, where the output has a publisher id.
    contiguous_from_request: its readers take only a replay that starts at the number they asked for.
    finds_by: what its readers find a prompt by: "token_ids", or "block_hashes" that they compute as the engine
        does; "" where that is up to the reader.
    tokens: false in an output that redacts them: `token_ids` is empty, `extra_keys` nil or left out.
    """

    name: str
    readers: str
    layout: Layout = Layout.MAP
    hashes: HashForm = HashForm.LOW64
    one_hash: bool = False
    stored: tuple[str, ...] = STORED_KEYS[:7]
    stored_if_set: tuple[str, ...] = ()
    removed: tuple[str, ...] = REMOVED_KEYS[:2]
    removed_if_set: tuple[str, ...] = ()
    media: tuple[tuple[str, str], ...] | None = None
    groups: Groups = Groups.MAIN
    inner: bool = False
    plain_extra_keys: bool = False
    publisher_id: bool = False
    contiguous_from_request: bool = False
    finds_by: str = ""
    tokens: bool = True

    def medium(self, name: str) -> str | None:
        """What a medium is called here; None if it is filtered out."""
        return name if self.media is None else dict(self.media).get(name)

    def says(self, key: str) -> bool:
        """Whether this key of a store can appear."""
        return key in self.stored or key in self.stored_if_set


def _as_named(*media: str) -> tuple[tuple[str, str], ...]:
    return tuple((medium, medium) for medium in media)


VLLM: Final = Dialect(
    name="vllm",
    readers="vLLM 0.33 readers, Subscriber",
    stored_if_set=STORED_KEYS[7:],
    removed_if_set=REMOVED_KEYS[2:],
    groups=Groups.ALL,
    inner=True,
    publisher_id=True,
)

_ALL = (
    VLLM,
    Dialect(
        name="vllm-array",
        readers="readers of vLLM up to 0.23",
        layout=Layout.ARRAY,
        stored=STORED_KEYS[:11],
        removed=REMOVED_KEYS[:3],
        groups=Groups.ALL,
        inner=True,
    ),
    Dialect(
        name="dynamo",
        readers="NVIDIA Dynamo 1.6",
        finds_by="token_ids",
        stored_if_set=("extra_keys",),
        media=_as_named(MEDIUM_GPU, MEDIUM_CPU, MEDIUM_STORAGE, MEDIUM_EXTERNAL),
        plain_extra_keys=True,
    ),
    Dialect(
        name="llm-d",
        readers="llm-d router, old ones too",
        finds_by="token_ids",
        layout=Layout.ARRAY,
        hashes=HashForm.NARROW,
        stored=STORED_KEYS[:8],
        media=_as_named(MEDIUM_GPU, MEDIUM_CPU),
        plain_extra_keys=True,
    ),
    Dialect(
        name="vllm-router",
        readers="vllm-router 0.1.17",
        finds_by="token_ids",
        contiguous_from_request=True,
        media=_as_named(MEDIUM_GPU, MEDIUM_CPU, MEDIUM_STORAGE),
    ),
    Dialect(
        name="mooncake",
        readers="Mooncake Conductor",
        finds_by="block_hashes",
        media=_as_named(MEDIUM_GPU),
    ),
    Dialect(
        name="aibrix",
        readers="AIBrix gateway",
        finds_by="token_ids",
        layout=Layout.ARRAY,
        hashes=HashForm.HIGH64_SIGNED,
        one_hash=True,
        media=_as_named(MEDIUM_GPU),
    ),
    Dialect(
        name="sglang",
        readers="SGLang router, SGLang 0.5 readers",
        finds_by="token_ids",
        hashes=HashForm.LOW64_SIGNED,
        stored=STORED_KEYS[:6],
        stored_if_set=("lora_name",),
        media=(
            (MEDIUM_GPU, "GPU"),
            (MEDIUM_CPU, "CPU_PINNED"),
            (MEDIUM_STORAGE, "DISK"),
            (MEDIUM_EXTERNAL, "EXTERNAL"),
        ),
    ),
)

DIALECTS: Final[dict[str, Dialect]] = {dialect.name: dialect for dialect in _ALL}
