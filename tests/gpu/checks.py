"""Checks of the CUDA data plane against a sidecar process, one JSON line each. run.sh says how to start it.

Exit codes: 0 all good, 1 a check failed, 3 there is no GPU.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.pop(0)  # where `engine` is the module beside this one, and not the folder of tests
sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.bench import bench
from gpu.connector import connector, connector_refusal
from gpu.engine import DEADLINE_S, KvEngine, Shape, prompt
from gpu.machine import CpuMachine, forget_names_of, open_machine
from gpu.vllm_engine import vllm_engine
from kvevents_service.cuda import CudaMissing, load_driver
from kvevents_service.engine.cuda import KvTensor, NotShareable, export

HERE = Path(__file__).parent
GPU_SHAPE, CPU_SHAPE = Shape(16, 2048, 4096), Shape(2, 64, 128)
"""2 GiB: 16 layers, 2048 blocks of 1 MiB in pieces of 32 KiB."""
NO_GPU = 3

Result = dict[str, object]


def store_evict_load(engine: KvEngine) -> Result:
    """Twice as much as the tier holds goes in; what is still there comes back as it was."""
    blocks, length = engine.shape.blocks, engine.shape.blocks // 32
    chains = [
        (prompt(number, length), list(range(start, start + length)))
        for number, start in enumerate(range(0, blocks, length))
    ]
    stored = 0
    for chain, ids in chains:
        mark = engine.compute(ids, ids)
        stored += engine.wait(engine.offer(chain, ids, mark))
    engine.poison(list(range(blocks)))
    loaded = corrupt = 0
    for chain, ids in reversed(chains):
        came = engine.load(chain, ids)
        corrupt += engine.corrupt(ids[:came], ids[:came])
        loaded += came
    good = stored == blocks and loaded >= blocks * 3 // 8 and not corrupt
    return {"ok": good, "stored": stored, "loaded": loaded, "corrupt": corrupt}


def fences_under_reuse(engine: KvEngine) -> Result:
    """Offered before it is computed, overwritten when its step has ended: what is loaded is what was computed."""
    length, corrupt, loaded = engine.shape.blocks // 8, 0, 0
    for number in range(4):
        chain, seeds = prompt(1000 + number, length), [1000 * number + block for block in range(length)]
        here, there = list(range(length)), list(range(length, 2 * length))
        engine.poison(here + there)
        step = engine.offer(chain, here, engine.passes + 1)
        engine.compute(here, seeds)
        assert engine.wait(step) == length
        engine.poison(here)
        came = engine.load(chain, there)
        loaded += came
        corrupt += engine.corrupt(there[:came], seeds[:came])
    return {"ok": loaded == 4 * length and not corrupt, "loaded": loaded, "corrupt": corrupt}


def killed_mid_copy(engine: KvEngine, path: str, cpu: bool) -> Result:
    """Another engine dies in the middle of its stores: the sidecar lets go of it, and this one goes on."""
    command = [sys.executable, __file__, "--victim", path, *(["--cpu"] if cpu else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        said = victim.stdout.readline().strip()
        victim.send_signal(signal.SIGKILL)
    forget_names_of(victim.pid)
    started, stats = time.monotonic(), dict[str, int]()
    while time.monotonic() - started < DEADLINE_S:
        inspected = engine.client.inspect()
        stats = inspected.stats if inspected else {}
        if (stats.get("sessions"), stats.get("copies")) == (1, 0):
            break
        time.sleep(0.05)
    let_go_s = time.monotonic() - started
    after = fences_under_reuse(engine)
    good = said == "offered" and stats.get("sessions") == 1 and stats.get("copies") == 0 and bool(after["ok"])
    return {"ok": good, "let_go_s": round(let_go_s, 3), "copies_failed": stats.get("copies_failed")}


def victim(path: str, cpu: bool) -> None:
    """Offer everything, say so, and wait to be killed."""
    shape = CPU_SHAPE if cpu else GPU_SHAPE._replace(blocks=512)
    engine = KvEngine(open_machine(cpu), path, shape)
    ids = list(range(shape.blocks))
    engine.offer(prompt(5000, shape.blocks), ids, engine.compute(ids, ids))
    print("offered", flush=True)
    time.sleep(DEADLINE_S)


def expandable_segments_are_refused(cpu: bool) -> Result:
    """Memory that has no handle is refused with what to set."""
    if not cpu:
        command = [sys.executable, __file__, "--expandable"]
        setting = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        said = subprocess.run(command, env=os.environ | setting, capture_output=True, text=True, check=False).stdout
    else:
        said = expandable(cpu)
    return {"ok": said.count("expandable_segments:False") == 2, "said": said.strip()[-400:]}


def expandable(cpu: bool) -> str:
    """Two errors: of a layout of tensors, and of vLLM's connector."""
    machine = open_machine(cpu)
    if isinstance(machine, CpuMachine):
        machine.library.legacy = False
    try:
        export(machine.driver, [KvTensor("layer", machine.empty(1 << 20).view(8, -1))])
    except NotShareable as error:
        return f"{error}\n{connector_refusal(machine)}"
    finally:
        machine.close()
    return "it was not refused"


# the run


@contextmanager
def sidecar(cpu: bool, host_bytes: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "run", "engine.sock")
        command = [sys.executable, str(HERE / "sidecar.py"), path, str(host_bytes), *(["--cpu"] if cpu else [])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline(), "the sidecar did not start"
                yield path
            finally:
                process.terminate()
                if process.wait(30):
                    print(f"tests/gpu: the sidecar ended with {process.returncode}", file=sys.stderr)
        forget_names_of(process.pid)


def say(name: str, result: Result, seconds: float) -> bool:
    print(json.dumps({"check": name, **result, "seconds": round(seconds, 2)}), flush=True)
    return bool(result["ok"])


def check(name: str, work: Callable[[], Result]) -> bool:
    started = time.monotonic()
    try:
        result = work()
    except Exception as error:  # noqa: BLE001  the border of a check: the others are still worth running
        result = {"ok": False, "error": f"{type(error).__name__}: {error}"}
    return say(name, result, time.monotonic() - started)


def all_checks(cpu: bool) -> int:
    shape, machine = (CPU_SHAPE if cpu else GPU_SHAPE), open_machine(cpu)
    say("machine", {"ok": True, "device": machine.name, "load_average": os.getloadavg()[0]}, 0.0)
    good = [check("expandable_segments_are_refused", lambda: expandable_segments_are_refused(cpu))]
    with sidecar(cpu, shape.blocks // 2 * shape.block_bytes) as path:
        engine = KvEngine(machine, path, shape)
        good.append(check("store_evict_load", lambda: store_evict_load(engine)))
        good.append(check("fences_under_reuse", lambda: fences_under_reuse(engine)))
        good.append(check("killed_mid_copy", lambda: killed_mid_copy(engine, path, cpu)))
        good.append(check("leave", lambda: {"ok": engine.close()}))
    with sidecar(cpu, 64 << 20) as path:
        good.append(check("connector", lambda: connector(machine, path)))
    with sidecar(cpu, 64 << 20) as path:
        good.append(check("vllm_engine", lambda: vllm_engine(path, cpu)))
    good += [check(name, work) for name, work in bench(machine, cpu)]
    machine.close()
    return 0 if all(good) else 1


def main(*flags: str) -> int:
    cpu = "--cpu" in flags
    if not cpu:
        try:
            found = bool(load_driver().uuids())
        except CudaMissing as error:
            print(f"tests/gpu: {error}", file=sys.stderr)
            found = False
        if not found:
            print(
                "tests/gpu: no GPU here, nothing was checked (--cpu plays one with shared memory)", file=sys.stderr
            )
            return NO_GPU
    if "--victim" in flags:
        victim(flags[1], cpu)
        return 0
    if "--expandable" in flags:
        print(expandable(cpu))
        return 0
    return all_checks(cpu)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
