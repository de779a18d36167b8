"""Records what vLLM says of extra keys, for test_identity.py. Run by hand, in a virtual environment with vLLM 0.33:

    ORACLE/bin/python tests/engine/record_extra_keys.py > tests/engine/extra_keys.jsonl

One case a line: an identity, a block size, and for each walk over consecutive blocks [first, stop) what
`to_event_extra_keys` makes of `generate_block_hash_extra_keys`; the item index goes from block to block (0 at
the start of a walk). Bytes are {"hex": ...}; `digests` are those of the prompt embeddings, by "start-stop".
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")

import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, to_event_extra_keys
from vllm.v1.request import Request

CASES = 80


def plain(value: Any) -> Any:
    """A key as JSON has it."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def random_media(dice: random.Random, tokens: int) -> list[tuple[str, int, int]]:
    """Items one behind another, sometimes touching; now and then one that overlaps the one before."""
    media, at = [], dice.choice([0, dice.randrange(40)])
    while at < tokens and len(media) < dice.randint(0, 6):
        length = dice.choice([1, dice.randrange(1, 20), dice.randrange(1, 90)])
        media.append((f"image-{dice.randrange(3)}", at, length))
        at += dice.choice([length, length + dice.randrange(40), max(1, length // 2)])
    return media


def make_request(case: dict[str, Any], tokens: int, embeds: bool) -> Request:
    lora = case["lora"]
    return Request(
        request_id="r",
        prompt_token_ids=None if embeds else list(range(tokens)),
        prompt_embeds=torch.arange(tokens * 2, dtype=torch.float32).view(tokens, 2) if embeds else None,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=[
            MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, length))
            for name, offset, length in case["media"]
        ]
        or None,
        lora_request=lora and LoRARequest(lora[1], lora[0], "/adapters/x"),
        cache_salt=case["salt"],
    )


def walk(request: Request, block_size: int, first: int, stop: int) -> list[Any]:
    keys, index = [], 0
    for block in range(first, stop):
        found, index = generate_block_hash_extra_keys(request, block * block_size, (block + 1) * block_size, index)
        keys.append(found)
    return [plain(entry) for entry in to_event_extra_keys(keys) or []]


def make_case(number: int) -> dict[str, Any]:
    dice = random.Random(number)
    block_size, blocks = dice.choice([4, 16, 32, 48]), dice.randint(1, 12)
    embeds = dice.random() < 0.2
    case: dict[str, Any] = {
        "block_size": block_size,
        "lora": dice.choice([None, (1, "a"), (7, "b")]),
        "salt": dice.choice([None, "s", "tenant"]),
        "media": [] if embeds else random_media(dice, block_size * blocks),
    }
    request = make_request(case, block_size * blocks, embeds)
    spans = [(0, blocks), *(sorted(dice.choices(range(blocks + 1), k=2)) for _ in range(3))]
    case["walks"] = [{"blocks": [*span], "keys": walk(request, block_size, *span)} for span in spans]
    case["digests"] = {
        f"{start}-{stop}": digest.hex() for (start, stop), digest in request._prompt_embeds_per_block_hashes.items()
    }
    return case


if __name__ == "__main__":
    for number in range(CASES):
        sys.stdout.write(json.dumps(make_case(number), separators=(",", ":")) + "\n")
