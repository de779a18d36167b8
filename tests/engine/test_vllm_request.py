"""A vLLM request in our terms."""

from types import SimpleNamespace
from typing import Any

from kvevents_service.engine.identity import Identity, MediaItem
from kvevents_service.engine.vllm_request import VllmRequest, identity_of, known_tokens, view_of


def request(**more: Any) -> VllmRequest:
    plain = {
        "request_id": "r",
        "block_hashes": [b"h" * 32],
        "all_token_ids": list(range(20)),
        "num_prompt_tokens": 20,
        "lora_request": None,
        "cache_salt": None,
        "mm_features": [],
        "prompt_embeds": None,
        "resumable": False,
    }
    made: Any = SimpleNamespace(**plain | more)
    return made


def digest(request: VllmRequest, start: int, stop: int) -> bytes:
    return b"%d-%d" % (start, stop)


def test_a_plain_request_has_no_identity() -> None:
    assert identity_of(request(), digest) == Identity()


def test_adapter_salt_and_items_in_order_of_their_place() -> None:
    def item(name: str, offset: int) -> SimpleNamespace:
        return SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=3))

    lora = SimpleNamespace(adapter_id=4, name="tuned")
    made = request(lora_request=lora, cache_salt="tenant", mm_features=[item("dog", 9), item("cat", 2)])
    media = (MediaItem("cat", 2, 3), MediaItem("dog", 9, 3))
    assert identity_of(made, digest) == Identity(4, "tuned", "tenant", media)


def test_embeddings_have_a_digest_for_any_range() -> None:
    embeds = identity_of(request(prompt_embeds=object()), digest).embeds
    assert embeds is not None
    assert embeds(4, 8) == b"4-8"


def test_a_view_is_of_the_requests_own_buffers() -> None:
    made = request()
    view = view_of(made, digest)
    assert view.unit_hashes is made.block_hashes
    assert view.token_ids is made.all_token_ids
    assert view.owner is made, "which goes when they do, and not before"
    assert not view.rewritten
    assert view_of(request(resumable=True), digest).rewritten
    assert view.fine_tokens == 0


def test_a_fine_hit_leaves_a_token_to_compute() -> None:
    assert view_of(request(), digest, 4).fine_tokens == 16
    assert view_of(request(num_prompt_tokens=21), digest, 4).fine_tokens == 20


def test_tokens_of_running_steps_are_not_known() -> None:
    assert known_tokens(request(num_computed_tokens=30, num_in_flight_tokens=8)) == 22
    assert known_tokens(request(num_computed_tokens=0, num_in_flight_tokens=8)) == 0
