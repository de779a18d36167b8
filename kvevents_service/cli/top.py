"""`kvevents top`: sidecars and relays on one screen, drawn anew every so often, from their admin endpoints.

0    --count screens are drawn, or the reader of stdout has gone
1    none of the sidecars answered at the last screen
2    bad usage, or something is not installed
130  interrupted
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, NamedTuple

import click
import msgspec

from kvevents_service.cli.render import escape, plural
from kvevents_service.cli.sidecar_state import DEFAULT_URL, State, state_of
from kvevents_service.cli.terminal import chat, discard_stdout, moves_cursor, write
from kvevents_service.cli.top_figures import Figures, figures
from kvevents_service.cli.top_sources import source_table, span
from kvevents_service.errors import ConfigError, SidecarGone, not_installed
from kvevents_service.sizes import size_text

if TYPE_CHECKING:
    from rich.console import Group

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
ANSWER_S: Final = 2.0
MAX_URLS: Final = 256
COLUMNS: Final[dict[str, Callable[[Figures], str]]] = {
    "up": lambda f: span(f.up_s),
    "engines": lambda f: str(f.engines),
    "tier": lambda f: "-" if f.used is None else f"{f.used:.1%} of {size_text(f.capacity_bytes)}",
    "stored/s": lambda f: f"{f.stored_per_s:,.0f}",
    "removed/s": lambda f: f"{f.removed_per_s:,.0f}",
    "loaded/s": lambda f: f"{f.loaded_per_s:,.0f}",
    "copied/s": lambda f: size_text(f.copied_bytes_per_s),
    "hit rate": lambda f: "-" if f.hit_rate is None else f"{f.hit_rate:.1%}",
    "readers": lambda f: str(f.subscribers),
    "pending": lambda f: f"{f.pending} ({f.oldest_s:.1f} s)" if f.pending else "0",
    "errors": lambda f: str(f.errors),
}
WIDE: Final = 130
NARROW: Final[dict[str, Callable[[Figures], str]]] = {
    **{heading: COLUMNS[heading] for heading in ("engines", "tier", "stored/s", "hit rate", "pending", "errors")},
    "tier": lambda f: "-" if f.used is None else f"{f.used:.1%}",
}
"""Where there is less room: 80 columns are enough."""


class Row(NamedTuple):
    """One sidecar: its figures, or why there are none."""

    url: str
    state: State | None
    figures: Figures | None
    fault: str = ""


class Watch:
    """Asks all sidecars at once, and remembers what each said last."""

    def __init__(self, urls: tuple[str, ...]) -> None:
        self._urls = urls
        self._last: dict[str, State] = {}

    def rows(self) -> list[Row]:
        with ThreadPoolExecutor(min(32, len(self._urls))) as threads:
            return list(threads.map(self._row, self._urls))

    def _row(self, url: str) -> Row:
        try:
            state = state_of(url, ANSWER_S)
        except SidecarGone as error:
            self._last.pop(url, None)
            return Row(url, None, None, str(error))
        before = self._last.get(url)
        self._last[url] = state
        return Row(url, state, figures(before, state))


@click.command(
    short_help="Watch sidecars on one screen.",
    epilog="Exit codes: 0 fine, 1 no sidecar answered, 2 bad usage, 130 interrupted.",
)
@click.argument("urls", metavar="[URL]...", nargs=-1)
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=2.0,
    show_default=True,
    metavar="S",
    help="Seconds between two screens.",
)
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="Stop after N screens.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a sidecar and screen.")
def top(urls: tuple[str, ...], interval: float, count: int | None, as_json: bool) -> int:
    """Watch sidecars and relays live: how full they are, what they store and load, who reads, what waits, and how
    the engines' own streams stand that they relay.

    A URL is the `admin` of a sidecar's ready line; without one that of this machine is asked. Rates are of the time
    between two screens.

    \b
    kvevents top
    kvevents top http://10.0.0.7:9470 http://10.0.0.8:9470
    kvevents top --json --count 2 | jq .hit_rate
    """
    if len(urls) > MAX_URLS:
        raise click.UsageError(f"at most {MAX_URLS} sidecars")
    watch = Watch(urls or (DEFAULT_URL,))
    try:
        show = _say_json if as_json else _screen()
        return _draw(watch, show, interval, count)
    except ConfigError as error:
        chat(f"kvevents top: {error}")
        return EXIT_USAGE
    except BrokenPipeError:
        discard_stdout()
        return EXIT_OK


def _draw(watch: Watch, show: Callable[[list[Row]], None], interval: float, count: int | None) -> int:
    rows: list[Row] = []
    for number in _numbers(count):
        if number:
            time.sleep(interval)
        rows = watch.rows()
        show(rows)
    return EXIT_OK if any(row.figures for row in rows) else EXIT_FAILED


def _numbers(count: int | None) -> Iterator[int]:
    number = 0
    while count is None or number < count:
        yield number
        number += 1


def _say_json(rows: list[Row]) -> None:
    for row in rows:
        plain = {"url": row.url, **({"fault": row.fault} if row.figures is None else row.figures.plain())}
        write(msgspec.json.encode(plain).decode())


def _screen() -> Callable[[list[Row]], None]:
    """Draws over the last screen on a terminal, below it elsewhere."""
    try:
        from rich.console import Console
    except ImportError:
        raise not_installed("rich", "top") from None
    console = Console(highlight=False)

    def show(rows: list[Row]) -> None:
        if moves_cursor():
            console.clear()
        console.print(screen(rows, narrow=console.width < WIDE))

    return show


def screen(rows: list[Row], *, narrow: bool = False) -> Group:
    """A table of all sidecars; below it one of their sources, if there are any, and those that do not answer."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("sidecar", overflow="fold")
    shown = NARROW if narrow else COLUMNS
    for heading in shown:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        if row.figures is not None:
            cells = [Text(read(row.figures)) for read in shown.values()]
            table.add_row(Text(name_of(row, engines=not narrow)), *cells)
    faults = [Text(escape(row.fault), style="red") for row in rows if row.figures is None]
    there = sum(row.figures is not None for row in rows)
    title = Text(f"{time.strftime('%H:%M:%S')}  {plural(there, 'sidecar')}", style="dim")
    sources = [(place_of(row), one) for row in rows if row.figures for one in row.figures.sources]
    below = (Text(""), source_table(sources, narrow=narrow)) if sources else ()
    return Group(title, table, *below, *faults)


def place_of(row: Row) -> str:
    return row.url.removeprefix("http://")


def name_of(row: Row, *, engines: bool) -> str:
    """Where it is, and the names of its engines; what it is if that is no sidecar; `draining` where it is."""
    if row.state is None:
        return escape(place_of(row))
    service = "" if row.state.service == "serve" else f"({escape(row.state.service)})"
    names = ", ".join(escape(engine.engine_id) for engine in row.state.engines) if engines else ""
    said = (escape(place_of(row)), service, names, "(draining)" if row.state.draining else "")
    return " ".join(filter(None, said))
