"""The peer: what vLLM 0.33's own scheduler and publisher cost. Runs only in the oracle's virtual environment.

    ORACLE/bin/python peer_vllm.py step BLOCKS EVICTING RUNS     us per block and run, stage by stage
    ORACLE/bin/python peer_vllm.py events BLOCKS EVICTING RUNS REQUESTS
        the same by CPU time, events on and off in turns, for BLOCKS blocks of each of REQUESTS requests
    ORACLE/bin/python peer_vllm.py publish BATCHES EVENTS RUNS   blocks/s per run, bytes per block
    ORACLE/bin/python peer_vllm.py decode BATCHES EVENTS RUNS    CPU us per block of a subscriber's decoder, per run
    ORACLE/bin/python peer_vllm.py memory BLOCKS                 bytes per resident block

One JSON line on stdout. After the oracle's bench_vllm.py; vLLM is 0.33.0, events are on where nothing else is said.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from itertools import count
from random import Random
from types import SimpleNamespace

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
BLOCK_TOKENS, BLOCK_BYTES, MAX_TOKENS, VOCABULARY = 16, 16 * 16 * 2 * 2, 40000, 128_000
WARM_UP = 3
NUMBERS = count(1)


def make_scheduler(gpu_blocks, cpu_blocks, events=True):
    import torch
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler

    register_all_kvcache_specs(vllm_config=None)
    size = BLOCK_BYTES * gpu_blocks
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=16, dtype=torch.float16)
    tensor = KVCacheTensor(size=size, layers=["l0"], layer_stride=size, block_stride=BLOCK_BYTES)
    cache = KVCacheConfig(
        num_blocks=gpu_blocks, kv_cache_tensors=[tensor], kv_cache_groups=[KVCacheGroupSpec(["l0"], spec)]
    )
    scheduler = SimpleCPUOffloadScheduler(
        vllm_config=make_config(events),
        kv_cache_config=cache,
        cpu_capacity_bytes=BLOCK_BYTES * cpu_blocks,
        scheduler_block_size=BLOCK_TOKENS,
        hash_block_size=BLOCK_TOKENS,
    )
    pool = BlockPool(num_gpu_blocks=gpu_blocks, enable_caching=True, hash_block_size=BLOCK_TOKENS)
    scheduler.bind_gpu_block_pool(pool)
    return scheduler, pool


def make_config(events):
    from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, SchedulerConfig, VllmConfig
    from vllm.config.kv_events import KVEventsConfig

    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=64,
            max_model_len=MAX_TOKENS,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        cache_config=CacheConfig(block_size=BLOCK_TOKENS, gpu_memory_utilization=0.9, enable_prefix_caching=True),
        kv_transfer_config=KVTransferConfig(kv_connector="SimpleCPUOffloadConnector", kv_role="kv_both"),
        device_config=DeviceConfig("cpu"),
    )
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=events)
    config.model_config = SimpleNamespace(max_model_len=MAX_TOKENS)  # all that the scheduler reads of a model
    return config


def make_hasher():
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    return get_request_block_hasher(BLOCK_TOKENS, sha256)


def scheduled(blocks, block_ids):
    """A step in which every request of `block_ids` is new."""
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

    new = [
        NewRequestData(
            req_id=request_id,
            prompt_token_ids=None,
            mm_features=[],
            sampling_params=None,
            pooling_params=None,
            block_ids=ids,
            num_computed_tokens=0,
            lora_request=None,
        )
        for request_id, ids in block_ids.items()
    ]
    return SchedulerOutput(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=CachedRequestData.make_empty(),
        num_scheduled_tokens=dict.fromkeys(block_ids, blocks * BLOCK_TOKENS),
        total_num_scheduled_tokens=len(block_ids) * blocks * BLOCK_TOKENS,
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        num_common_prefix_blocks=[],
        preempted_req_ids=set(),
        finished_req_ids=set(),
        free_encoder_mm_hashes=[],
    )


def prefilled_request(scheduler, pool, blocks, hasher):
    """A request whose blocks are on the GPU, hashed and cached. None of this is measured."""
    from vllm import SamplingParams
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

    number = next(NUMBERS)
    tokens = [(number * 7919 + i * 31) % VOCABULARY for i in range(blocks * BLOCK_TOKENS + 1)]
    request = Request(
        request_id=f"r{number}",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=None,
        block_hasher=hasher,
    )
    held = pool.get_new_blocks(blocks)
    pool.cache_full_blocks(
        request=request,
        blocks=held,
        num_cached_blocks=0,
        num_full_blocks=blocks,
        block_size=BLOCK_TOKENS,
        kv_cache_group_id=0,
    )
    request.num_computed_tokens = blocks * BLOCK_TOKENS
    scheduler.update_state_after_alloc(request, KVCacheBlocks(blocks=(held,)), num_external_tokens=0)
    return request, held, KVCacheBlocks(blocks=(held,)).get_block_ids()


def timed(clock, function, *arguments):
    started = clock()
    result = function(*arguments)
    return result, clock() - started


def one_step(scheduler, pool, blocks, hasher, requests=1, clock=time.perf_counter, events_on=True):
    """Seconds of each stage of one step that stores `blocks` blocks of each of `requests` requests."""
    from vllm.distributed.kv_events import KVEventBatch
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

    ready = [prefilled_request(scheduler, pool, blocks, hasher) for _ in range(requests)]
    output = scheduled(blocks, {request.request_id: block_ids for request, _, block_ids in ready})
    meta, prepare = timed(clock, scheduler.build_connector_meta, output)
    assert len(meta.store_gpu_blocks) == blocks * requests
    done = SimpleCPUOffloadWorkerMetadata(completed_store_events={meta.store_event: 1})
    output = KVConnectorOutput(finished_recving=set(), kv_connector_worker_meta=done)
    _, complete = timed(clock, scheduler.update_connector_output, output)
    events, take_events = timed(clock, lambda: list(scheduler.take_events()))
    assert len(events) >= blocks * requests if events_on else not events
    batch = KVEventBatch(ts=time.time(), events=events, data_parallel_rank=0)
    _, encode = timed(clock, ENCODER().encode, batch)
    for request, held, _ in ready:
        pool.free_blocks(reversed(held))
        scheduler.request_finished(request, [])
    return {"prepare": prepare, "complete": complete, "take_events": take_events, "encode": encode}


def ENCODER():
    import msgspec

    return msgspec.msgpack.Encoder()


def step(blocks, evicting, runs):
    cpu_blocks = blocks * 5 // 4 + 8 if evicting else blocks * (runs + WARM_UP + 1)
    scheduler, pool = make_scheduler(blocks * 2 + 64, cpu_blocks)
    hasher = make_hasher()
    times = [one_step(scheduler, pool, blocks, hasher) for _ in range(runs + WARM_UP)][WARM_UP:]
    return per_block(times, blocks)


def per_block(times, blocks):
    return {stage: [run[stage] / blocks * 1e6 for run in times] for stage in times[0]}


def events(blocks, evicting, runs, requests):
    """The same steps with events and without, in turns, by the thread's CPU time."""
    size = blocks * requests
    cpu_blocks = size * 5 // 4 + 8 if evicting else size * (runs + WARM_UP + 1)
    made = {on: make_scheduler(size * 2 + 64, cpu_blocks, on) for on in (True, False)}
    hasher, times = make_hasher(), {True: [], False: []}
    for _ in range(runs + WARM_UP):
        for on, (scheduler, pool) in made.items():
            times[on].append(one_step(scheduler, pool, blocks, hasher, requests, time.thread_time, on))
    return {"on": per_block(times[True][WARM_UP:], size), "off": per_block(times[False][WARM_UP:], size)}


def stored_event(number):
    from vllm.distributed.kv_events import BlockStored

    return BlockStored(
        block_hashes=[(number * 0x9E3779B97F4A7C15) % 2**64],
        parent_block_hash=(number * 77777777777777) % 2**64,
        token_ids=Random(number).choices(range(VOCABULARY), k=BLOCK_TOKENS),
        block_size=BLOCK_TOKENS,
        lora_id=None,
        medium="CPU",
        lora_name=None,
        group_idx=0,
        kv_cache_spec_kind="full_attention",
        locality="LOCAL",
    )


def subscribe(endpoint, batches, answers):
    """Count every batch after the first one, undecoded."""
    import zmq

    socket = zmq.Context().socket(zmq.SUB)
    socket.set_hwm(0)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(endpoint)
    answers.put("connected")
    socket.recv_multipart()
    started, size = time.perf_counter(), 0
    for received in range(1, batches + 1):
        _, seq, payload = socket.recv_multipart()
        assert int.from_bytes(seq, "big") == received, "a batch was lost"
        size += len(payload)
    answers.put((started, time.perf_counter(), size))


def publish_once(batches, events, port):
    from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher

    endpoint, spawn = f"ipc:///tmp/kvbench-peer-{os.getpid()}-{port}", multiprocessing.get_context("spawn")
    publisher = ZmqEventPublisher(0, endpoint=endpoint, topic="t", hwm=0, max_queue_size=batches + 10)
    answers = spawn.Queue()
    process = spawn.Process(target=subscribe, args=(endpoint, batches, answers))
    process.start()
    answers.get()
    time.sleep(0.5)
    made = [
        KVEventBatch(ts=time.time(), events=[stored_event(b * events + j) for j in range(events)])
        for b in range(batches)
    ]
    publisher.publish(KVEventBatch(ts=0.0, events=[]))
    time.sleep(0.3)
    started = time.perf_counter()
    for batch in made:
        publisher.publish(batch)
    _, ended, size = answers.get()
    process.join()
    publisher.shutdown()
    os.unlink(endpoint.removeprefix("ipc://"))
    return batches * events / (ended - started), size / (batches * events)


def publish(batches, events, runs):
    results = [publish_once(batches, events, number) for number in range(runs)]
    return {"blocks_per_s": [rate for rate, _ in results], "bytes_per_block": results[0][1]}


def decode(batches, events, runs):
    """vLLM's own types read its own payloads, as its example of a subscriber does."""
    import msgspec
    from vllm.distributed.kv_events import KVEventBatch

    decoder, encode = msgspec.msgpack.Decoder(KVEventBatch), ENCODER().encode
    payloads = [
        encode(
            KVEventBatch(
                ts=time.time(),
                events=[stored_event(b * events + j) for j in range(events)],
                data_parallel_rank=0,
            )
        )
        for b in range(batches)
    ]
    costs = []
    for _ in range(runs + 1):
        started = time.thread_time()
        for payload in payloads:
            decoder.decode(payload)
        costs.append((time.thread_time() - started) / (batches * events) * 1e6)
    return {"us_per_block": costs[1:], "bytes_per_block": sum(map(len, payloads)) / (batches * events)}


def rss_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory(blocks):
    """Growth from before the offload pool to `blocks` resident blocks; the GPU pool is small and warm."""
    import gc

    per_step, hasher = 2048, make_hasher()
    warm = make_scheduler(per_step * 2 + 64, per_step * 5)
    for _ in range(WARM_UP):
        one_step(*warm, per_step, hasher)
    gc.collect()
    before = rss_bytes()
    scheduler, pool = make_scheduler(per_step * 2 + 64, blocks + per_step)
    for _ in range(blocks // per_step):
        one_step(scheduler, pool, per_step, hasher)
    gc.collect()
    return {"bytes_per_block": (rss_bytes() - before) / (blocks // per_step * per_step)}


if __name__ == "__main__":
    verbs = {"step": step, "events": events, "publish": publish, "decode": decode, "memory": memory}
    print(json.dumps(verbs[sys.argv[1]](*map(int, sys.argv[2:]))), flush=True)
