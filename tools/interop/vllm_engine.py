"""A real vLLM engine on CPU, unmodified, that publishes its own KV events. Run with the engine's own python.

    python vllm_engine.py MODEL PUB REPLAY GPU_BLOCKS

One JSON line on stdin for each order, one on stdout for its end:
    {"do": "generate", "prompts": [[token, ...], ...]}   prefill each
    {"do": "hashes", "tokens": [...]}                    the hashes of its whole blocks, hex
    {"do": "held"}                                       the hashes in its prefix cache, hex
    {"do": "reset"}                                      reset_prefix_cache, and a step: vLLM says it only then
    {"do": "batches", "count": N}                        N batches of its publisher: a block comes and goes
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
BLOCK_SIZE = 32
AT_ONCE = 500


class Engine:
    """In one process, so that its prefix cache can be looked at."""

    def __init__(self, model: str, pub: str, replay: str, gpu_blocks: int) -> None:
        from vllm import LLM
        from vllm.config import KVEventsConfig

        events = KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=pub, replay_endpoint=replay, topic="kv"
        )
        self._llm = LLM(
            model=model,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            max_model_len=320,
            block_size=BLOCK_SIZE,
            enable_prefix_caching=True,
            max_num_seqs=4,
            max_num_batched_tokens=512,
            seed=0,
            num_gpu_blocks_override=gpu_blocks,
            kv_events_config=events,
        )
        core: Any = self._llm.llm_engine.engine_core
        self._scheduler = core.engine_core.scheduler
        self._hash_name = core.engine_core.vllm_config.cache_config.prefix_caching_hash_algo

    def generate(self, prompts: list[list[int]]) -> None:
        from vllm import SamplingParams

        one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)
        for tokens in prompts:
            self._llm.generate([{"prompt_token_ids": tokens}], one, use_tqdm=False)

    def hashes(self, tokens: list[int]) -> list[str]:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import hash_block_tokens

        make, parent, found = get_hash_fn_by_name(self._hash_name), None, []
        for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
            parent = hash_block_tokens(make, parent, tokens[start : start + BLOCK_SIZE], None)
            found.append(parent.hex())
        return found

    def held(self) -> list[str]:
        from vllm.v1.core.kv_cache_utils import get_block_hash

        pool = self._scheduler.kv_cache_manager.block_pool
        return [get_block_hash(name).hex() for name in pool.cached_block_hash_to_block._cache]

    def reset(self) -> bool:
        done = bool(self._llm.reset_prefix_cache())
        self.generate([[1, 2, 3]])
        return done

    def batches(self, count: int) -> None:
        from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

        stored = BlockStored([7], None, [9] * BLOCK_SIZE, BLOCK_SIZE, None, medium="GPU", lora_name=None)
        removed = BlockRemoved([7], medium="GPU")
        for number in range(count):
            event = removed if number % 2 else stored
            self._scheduler.kv_event_publisher.publish(KVEventBatch(ts=time.time(), events=[event]))
            if number % AT_ONCE == 0:
                time.sleep(0.05)


def main() -> None:
    out = os.fdopen(os.dup(1), "w")  # vLLM writes to stdout as it likes
    os.dup2(2, 1)
    model, pub, replay, gpu_blocks = sys.argv[1:]
    engine = Engine(model, pub, replay, int(gpu_blocks))
    out.write('{"ready": true}\n')
    out.flush()
    for line in sys.stdin:
        order = json.loads(line)
        done = getattr(engine, order.pop("do"))(**order)
        out.write(json.dumps({"done": done}) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
