"""`kvevents demo`: the main job, live, on production traffic: engine -> offload -> events -> tail."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from importlib.resources import as_file, files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import click
import msgspec

from kvevents_service.cli.demo_run import DemoRun, DemoSettings, Summary
from kvevents_service.cli.demo_view import make_view
from kvevents_service.cli.terminal import chat, discard_stdout, write
from kvevents_service.errors import ConfigError, SidecarGone

EXIT_OFF = 1
TRACE = "conversation-200.jsonl"
TRACE_REQUESTS = 200
MODEL_HELP = "hybrid: full attention, sliding window and mamba; adapters, salts and images on part of the traffic."
OFFLOAD_HELP = "eager: blocks are stored when they are computed; lazy: when the engine is about to reuse them."
BLOCKS_HELP = "Blocks of the engine's cache; few of them make it preempt. The longest prompt must fit."
LEAST_BLOCKS = 7900
MIB = 1024 * 1024
HOST_BYTES = {"cpu": 256 * MIB, "disk": 0, "cpu+disk": 64 * MIB}
DISK_BYTES = {"cpu": 0, "disk": 256 * MIB, "cpu+disk": 256 * MIB}
TIER_HELP = (
    "Where blocks are kept. cpu+disk: what leaves host memory is on the disk by then, and hits bring it back."
)


@click.command(
    short_help="See the whole path work.",
    epilog="Exit codes: 0 everything was right, 1 something was off, 2 bad usage, 130 interrupted.",
)
@click.option("--json", "as_json", is_flag=True, help="Print only the summary, as one JSON object.")
@click.option("--events", is_flag=True, help="Print every event as `kvevents tail` does: thousands of lines.")
@click.option("--model", default="full", show_default=True, type=click.Choice(["full", "hybrid"]), help=MODEL_HELP)
@click.option(
    "--offload", default="eager", show_default=True, type=click.Choice(["eager", "lazy"]), help=OFFLOAD_HELP
)
@click.option("--requests", default=TRACE_REQUESTS, show_default=True, type=click.IntRange(1, TRACE_REQUESTS))
@click.option(
    "--engine-blocks", default=8192, show_default=True, type=click.IntRange(LEAST_BLOCKS), help=BLOCKS_HELP
)
@click.option("--tier", default="cpu", show_default=True, type=click.Choice([*HOST_BYTES]), help=TIER_HELP)
@click.option(
    "--host-bytes",
    type=click.IntRange(1),
    help="Size of the host tier.",
    show_default="256 MiB; before a disk 64 MiB",
)
@click.option("--disk-bytes", type=click.IntRange(1), help="Size of the disk tier.", show_default="256 MiB")
@click.option(
    "--pub", default="tcp://127.0.0.1:5557", show_default=True, help="Event endpoint; any free port if taken."
)
@click.option("--replay", default="tcp://127.0.0.1:5558", show_default=True, help="Replay endpoint, likewise.")
@click.option("--color", default="auto", type=click.Choice(["auto", "always", "never"]), show_default=True)
def demo(as_json: bool, events: bool, color: str, **options: Any) -> int:
    """Run a sidecar and a reference engine on a slice of production traffic, and watch the event stream.

    The engine verifies every byte it gets back; the end compares the fold of the stream with the resident set.
    Kill either process while it runs (kill -9 its pid): the demo starts it again and goes on.
    """
    with tempfile.TemporaryDirectory(prefix="kvevents-demo-") as directory, as_file(_trace()) as trace:
        settings = DemoSettings(trace, Path(directory), **_sized(**options))
        view = make_view(color, as_json, events)
        try:
            summary = asyncio.run(_run(DemoRun(settings, view.show, view.say)))
        except (ConfigError, SidecarGone, TimeoutError) as error:
            chat(f"kvevents demo: {error or 'the stream did not catch up'}")
            return EXIT_OFF
        except BrokenPipeError:
            discard_stdout()
            return 0
    view.end()
    write(msgspec.json.encode(summary).decode() if as_json else table(summary))
    faults = summary.faults(settings.requests)
    for fault in faults:
        chat(f"kvevents demo: {fault}")
    return EXIT_OFF if faults else 0


async def _run(run: DemoRun) -> Summary:
    """Run it; a signal that would end us ends its processes first."""
    task = asyncio.current_task()
    assert task is not None, "runs in a task"
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        return await run.run()
    except asyncio.CancelledError:
        raise SidecarGone("ended by a signal") from None


def _trace() -> Traversable:
    return files("kvevents_service") / "data" / TRACE


def _sized(tier: str, host_bytes: int | None, disk_bytes: int | None, **options: Any) -> dict[str, Any]:
    """The options with the sizes of the tiers that there are to be; 0: there is none."""
    host, disk = HOST_BYTES[tier], DISK_BYTES[tier]
    return {**options, "host_bytes": host and (host_bytes or host), "disk_bytes": disk and (disk_bytes or disk)}


def _moves(summary: Summary) -> dict[str, str]:
    """Between two tiers."""
    if len(summary.blocks_resident_on) < 2:
        return {}
    resident = " / ".join(f"{blocks:,} {medium}" for medium, blocks in summary.blocks_resident_on.items())
    moved = f"{summary.blocks_demoted:,} / {summary.blocks_promoted:,} / {summary.evicted_unsaved:,}"
    return {"resident on": resident, "blocks demoted / promoted / unsaved": moved}


def table(summary: Summary) -> str:
    """The summary for people."""
    share = 100 * summary.hit_tokens / max(1, summary.prompt_tokens)
    rows = {
        "requests served": f"{summary.requests:,}",
        "prompt tokens": f"{summary.prompt_tokens:,}",
        "tokens from the tier": f"{summary.hit_tokens:,} ({share:.1f} %)",
        "blocks stored / removed / resident": (
            f"{summary.blocks_stored:,} / {summary.blocks_removed:,} / {summary.blocks_resident:,}"
        ),
        **_moves(summary),
        "bytes moved / verified": f"{summary.bytes_moved:,} / {summary.bytes_verified:,}",
        "corrupt blocks": f"{summary.corrupt_blocks}",
        "sequence gaps": f"{summary.gaps}",
        "stream equals resident set": "yes" if summary.stream_matches_resident else "NO",
        "restarts of sidecar / engine": f"{summary.sidecar_restarts} / {summary.engine_restarts}",
    }
    return "\n".join(["", *(f"{name:<36}{value}" for name, value in rows.items())])
