"""`python -m kvevents_service.engine`: the reference engine as a process."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec

from kvevents_service.engine.client import OffloadClient
from kvevents_service.engine.layout import EngineLayout
from kvevents_service.engine.model import MODELS
from kvevents_service.engine.trace import read_trace
from kvevents_service.errors import not_installed

if TYPE_CHECKING:
    from kvevents_service.engine.paged_cache import PagedCache

OFFLOAD_HELP = "eager: blocks of running requests, when confirmed; lazy: cached blocks that are about to be reused."
TRACE_FILE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)
SIZE: Final = click.IntRange(min=1)


@click.command()
@click.option("--engine-socket", required=True, metavar="PATH", help="That of `kvevents serve`.")
@click.option("--trace", required=True, type=TRACE_FILE, help="A Mooncake trace file.")
@click.option("--model", default="full", show_default=True, type=click.Choice(sorted(MODELS)))
@click.option(
    "--offload", default="eager", show_default=True, type=click.Choice(["eager", "lazy"]), help=OFFLOAD_HELP
)
@click.option("--skip", default=0, type=click.IntRange(0), help="Requests of the trace to leave out at its start.")
@click.option("--requests", type=click.IntRange(0), help="Requests to serve. [default: all]")
@click.option("--blocks", default=8192, show_default=True, type=SIZE, help="Blocks of the KV cache.")
@click.option("--layers", default=4, show_default=True, type=SIZE)
@click.option("--layer-bytes", default=512, show_default=True, type=SIZE, help="Bytes of one block in one layer.")
@click.option("--connect-wait", default=10.0, show_default=True, help="Seconds to wait for the sidecar at start.")
def main(
    engine_socket: str,
    trace: Path,
    model: str,
    offload: str,
    skip: int,
    requests: int | None,
    blocks: int,
    layers: int,
    layer_bytes: int,
    connect_wait: float,
) -> None:
    """Serve a trace with a real paged KV cache and print the counters as JSON lines."""
    try:
        import torch

        from kvevents_service.engine.paged_cache import PagedCache
        from kvevents_service.engine.reference import EngineSettings, ReferenceEngine, make_planner
    except ModuleNotFoundError as error:
        raise click.ClickException(str(not_installed(error.name or "a package", "offload"))) from error

    torch.set_num_threads(1)
    settings, kind = EngineSettings(), MODELS[model]
    cache = PagedCache(blocks, layers, layer_bytes)
    client = OffloadClient(engine_socket, _layout(cache, model, f"{layers}x{layer_bytes}"))
    if not client.wait_connected(connect_wait):
        click.echo(f"no sidecar at {engine_socket} ({client.last_error}): serving without one", err=True)
    planner = make_planner(cache, kind, settings, offload == "lazy")
    engine = ReferenceEngine(cache, client, kind, settings, planner)
    lines = islice(read_trace(trace), skip, None if requests is None else skip + requests)
    for counts in engine.run(lines, skip):
        sys.stdout.buffer.write(msgspec.json.encode(counts) + b"\n")
        sys.stdout.buffer.flush()
    client.close()


def _layout(cache: PagedCache, model: str, shape: str) -> EngineLayout:
    kind = MODELS[model]
    return EngineLayout(
        engine_id="reference",
        namespace=f"reference/{model}/{shape}",
        groups=kind.groups,
        memories=cache.memories,
        regions=cache.regions,
        fds=[cache.memory.fd],
        hash_tokens=kind.hash_tokens,
    )


if __name__ == "__main__":
    main()
