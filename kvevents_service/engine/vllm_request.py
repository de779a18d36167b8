"""What vLLM knows of a request, said in our terms. Nothing is copied: its buffers grow, and ours with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvevents_service.engine.identity import PLAIN, Identity, MediaItem
from kvevents_service.engine.spans import RequestView


class VllmRequest(Protocol):
    """The part of `vllm.v1.request.Request` that is read.

    `num_computed_tokens` counts those of running steps too; `num_in_flight_tokens` are of running steps alone.
    """

    request_id: str
    block_hashes: Sequence[bytes]
    all_token_ids: Sequence[int]
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_in_flight_tokens: int
    skip_reading_prefix_cache: bool
    lora_request: Any
    cache_salt: str | None
    mm_features: Sequence[Any]
    prompt_embeds: Any
    resumable: bool


EmbedsDigest = Callable[[VllmRequest, int, int], bytes]
"""The digest of the prompt embeddings of tokens [start, stop), as it goes into a block's hash."""


def known_tokens(request: VllmRequest) -> int:
    """Tokens whose step has given its output."""
    return max(0, request.num_computed_tokens - request.num_in_flight_tokens)


def identity_of(request: VllmRequest, digest: EmbedsDigest) -> Identity:
    """What tells its token ids apart from equal ones."""
    lora = request.lora_request
    if lora is None and not request.mm_features and request.cache_salt is None and request.prompt_embeds is None:
        return PLAIN
    media = [
        MediaItem(item.identifier, item.mm_position.offset, item.mm_position.length) for item in request.mm_features
    ]
    return Identity(
        None if lora is None else lora.adapter_id,
        None if lora is None else lora.name,
        request.cache_salt,
        tuple(sorted(media, key=lambda item: item.offset)),
        None if request.prompt_embeds is None else lambda start, stop: digest(request, start, stop),
    )


def view_of(request: VllmRequest, digest: EmbedsDigest, fine_unit: int = 0) -> RequestView:
    """`fine_unit`: tokens of a hash unit, if hits may end inside a block; else 0."""
    fine = (request.num_prompt_tokens - 1) // fine_unit * fine_unit if fine_unit else 0
    identity = identity_of(request, digest)
    session = request.resumable  # of which vLLM drops what was not computed, and after a preemption that is all
    return RequestView(
        request.request_id, request.block_hashes, request.all_token_ids, identity, fine, request, session
    )
