"""The sidecar of the checks, as a process: python sidecar.py SOCKET HOST_BYTES [--cpu]"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import msgspec
import torch
import uvloop

from gpu.cpu_driver import CpuLibrary
from kvevents_service.config import ServeConfig
from kvevents_service.cuda import Driver
from kvevents_service.service.app import Ready, serve
from kvevents_service.transfer import memory
from kvevents_service.transfer.cuda_device import CudaDevices


def main(path: str, host_bytes: str, *flags: str) -> int:
    if "--cpu" in flags:
        devices = CudaDevices(Driver(CpuLibrary()))
        memory.cuda_devices = lambda: devices  # type: ignore[assignment]
    torch.set_num_threads(1)
    endpoints = {"pub": "tcp://127.0.0.1:0", "replay": None}
    config = ServeConfig(engine_socket=path, host_bytes=int(host_bytes), **endpoints)  # type: ignore[arg-type]

    def announce(ready: Ready) -> None:
        print(msgspec.json.encode(ready).decode(), flush=True)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(config, announce))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
