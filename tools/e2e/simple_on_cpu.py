"""vLLM's SimpleCPUOffloadConnector where there is no GPU: its own scheduler half, copies done by torch.

What it decides, counts and announces is untouched. Copies run in a thread, as its own do on a stream, and on
any core: a GPU copies beside them.
"""

from __future__ import annotations

import os
import queue
import threading
from typing import Any
from unittest import mock

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import SimpleCPUOffloadConnector
from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker


class NoStream:
    """What stands for a CUDA stream."""

    def __init__(self, priority: int = 0) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0


class Done:
    @staticmethod
    def query() -> bool:
        return True

    @staticmethod
    def synchronize() -> None:
        pass


class ThreadBackend:
    """Copies whole blocks in the order they were asked for."""

    def __init__(self, device: dict[str, torch.Tensor], host: dict[str, torch.Tensor]) -> None:
        self._pairs = [(device[name], host[name]) for name in device]
        self._asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def launch_copy(
        self,
        src_blocks: list[int],
        dst_blocks: list[int],
        is_store: bool,
        event_idx: int,
        events_list: list[Any],
        wait_event: Any = None,
    ) -> None:
        self._asked.put((src_blocks, dst_blocks, is_store, event_idx, events_list))

    def _run(self) -> None:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))  # of this thread
        while True:
            source, target, is_store, number, ended = self._asked.get()
            for device, host in self._pairs:
                left, right = (host, device) if is_store else (device, host)
                left[target] = right[source]
            ended.append((number, Done))

    def shutdown(self) -> None:
        pass


class CpuWorker(SimpleCPUOffloadWorker):
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        with mock.patch("torch.cuda.Stream", NoStream):
            super().register_kv_caches(kv_caches)

    def _init_cpu_mode(self, unique_gpu_caches: dict[str, torch.Tensor], *others: Any) -> None:
        host = {
            name: torch.zeros((self.num_cpu_blocks, *cache.shape[1:]), dtype=cache.dtype)
            for name, cache in unique_gpu_caches.items()
        }
        self._backend = ThreadBackend(unique_gpu_caches, host)

    def wait_for_save(self) -> None:
        """A step has been computed when it returns: there is no event to wait for."""
        metadata = self._connector_metadata
        if metadata is not None and metadata.store_gpu_blocks:
            self._backend.launch_copy(
                metadata.store_gpu_blocks, metadata.store_cpu_blocks, True, metadata.store_event, self._store_events
            )


class SimpleOnCpu(SimpleCPUOffloadConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self.worker_handler is not None:
            self.worker_handler.__class__ = CpuWorker
