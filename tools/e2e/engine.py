"""A real vLLM on CPU that does as it is told; runs in the engine's virtual environment.

    python engine.py --model DIR --make KIND     makes the model
    python engine.py --model DIR [options]       one JSON command a line on stdin, one JSON answer a line on stdout

Commands: {"do": "ask", "prompts": [[token, ...], ...], "max_tokens": n}, {"do": "reset"},
{"do": "spent", "clock": of what comes}.
Answers begin with `MARK`: vLLM writes to stdout too. The first one says that the engine is there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

MARK = "e2e: "


COMMON = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}


def make_model(path: str, kind: str) -> None:
    """A small model with random weights, whose answers depend on every token of the prompt.

    "window": its layers have a sliding window in turn, so that its cache has two groups.
    """
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if kind == "window":
        layers = ["sliding_attention", "full_attention"] * 2
        window = Gemma3TextConfig(
            **COMMON, num_hidden_layers=4, layer_types=layers, sliding_window=64, query_pre_attn_scalar=32
        )
        Gemma3ForCausalLM(window).eval().save_pretrained(path)
    else:
        LlamaForCausalLM(LlamaConfig(**COMMON, num_hidden_layers=2)).eval().save_pretrained(path)


def start(options: argparse.Namespace) -> Any:
    import vllm
    from vllm import LLM
    from vllm.config import KVEventsConfig, KVTransferConfig

    more = json.loads(options.llm)
    vllm.__version__ = more.pop("version", vllm.__version__)
    transfer = KVTransferConfig(
        kv_connector=options.connector,
        kv_connector_module_path=options.module,
        kv_role="kv_both",
        kv_connector_extra_config=json.loads(options.extra),
    )
    events = KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint=options.pub, replay_endpoint=options.replay
    )
    return LLM(
        model=options.model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=options.max_len,
        block_size=32,
        max_num_seqs=4,
        max_num_batched_tokens=options.step_tokens,
        seed=0,
        num_gpu_blocks_override=options.blocks,
        kv_transfer_config=transfer,
        tensor_parallel_size=options.tensor_ranks,
        pipeline_parallel_size=options.pipeline_ranks,
        disable_log_stats=False,
        **({"kv_events_config": events} if options.pub else {}),
        **{"enable_prefix_caching": True, **more},
    )


def ask(llm: Any, command: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=command["max_tokens"], temperature=0, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in command["prompts"]]
    answers = llm.generate(prompts, sampling, use_tqdm=False)
    return {
        "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
        "cached": [answer.num_cached_tokens for answer in answers],
    }


def spent(clock: str) -> dict[str, Any]:
    import timed

    return timed.take(clock)


def obey(llm: Any, command: dict[str, Any]) -> dict[str, Any]:
    match command["do"]:
        case "ask":
            return ask(llm, command)
        case "reset":
            return {"ok": llm.reset_prefix_cache(reset_connector=True)}
        case "spent":
            return spent(command["clock"])
    raise ValueError(command["do"])


def say(answer: dict[str, Any]) -> None:
    sys.stdout.write(f"{MARK}{json.dumps(answer)}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--make", choices=["plain", "window"])
    parser.add_argument("--tensor-ranks", type=int, default=1)
    parser.add_argument("--pipeline-ranks", type=int, default=1)
    parser.add_argument("--connector")
    parser.add_argument("--module")
    parser.add_argument("--extra", default="{}")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--max-len", type=int, default=320)
    parser.add_argument("--step-tokens", type=int, default=512)
    parser.add_argument("--pub", default="")
    parser.add_argument("--replay")
    parser.add_argument(
        "--llm", default="{}", help="more arguments of `LLM`, as JSON; `version` is what vLLM says it is"
    )
    options = parser.parse_args()
    if options.make:
        make_model(options.model, options.make)
        return
    llm = start(options)
    import vllm

    say({"ready": True, "version": vllm.__version__})
    for line in sys.stdin:
        say(obey(llm, json.loads(line)))


if __name__ == "__main__":
    main()
