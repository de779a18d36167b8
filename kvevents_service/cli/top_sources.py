"""What `kvevents top` shows of relayed sources: figures out of two states, and a table of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from kvevents_service.cli.render import escape
from kvevents_service.cli.sidecar_state import Followed, State
from kvevents_service.sizes import size_text

if TYPE_CHECKING:
    from rich.console import JustifyMethod
    from rich.table import Table

COLORS: Final = {"connected": "green", "joining": "yellow", "connecting": "yellow", "stale": "red"}


class SourceFigures(NamedTuple):
    """One source. Rates are of the time between two states, the other counts since the start.

    age_s: of its last batch; None: nothing came. behind: batches that wait for one before them.
    """

    name: str
    dp_rank: int
    state: str
    age_s: float | None
    behind: int
    batches_per_s: float
    bytes_per_s: float
    gaps: int
    orphans: int
    duplicates: int
    replays: int
    resident: dict[str, int]


COLUMNS: Final[dict[str, Callable[[SourceFigures], str]]] = {
    "rank": lambda f: str(f.dp_rank),
    "state": lambda f: f.state,
    "last": lambda f: "-" if f.age_s is None else span(f.age_s),
    "behind": lambda f: str(f.behind),
    "batches/s": lambda f: f"{f.batches_per_s:,.1f}",
    "in/s": lambda f: size_text(f.bytes_per_s),
    "gaps": lambda f: str(f.gaps),
    "orphans": lambda f: f"{f.orphans:,}",
    "twice": lambda f: f"{f.duplicates:,}",
    "replays": lambda f: str(f.replays),
    "resident": lambda f: ", ".join(f"{escape(medium)} {blocks:,}" for medium, blocks in f.resident.items()) or "-",
}
WIDE_ONLY: Final = {"behind", "batches/s", "in/s", "twice", "replays"}
"""Left out where there is less room."""


def span(seconds: float) -> str:
    """A time for people: `17 s`, `5 min`, `3.2 h`, `12 d`."""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{max(0.0, seconds):.0f} s"


def source_figures(before: State | None, state: State) -> tuple[SourceFigures, ...]:
    """`before` is of the same life of the service, or None."""
    seconds = 0.0 if before is None else state.now - before.now
    then = {} if before is None else {(one.name, one.dp_rank): one.counts for one in before.sources}
    return tuple(_figures(one, then.get((one.name, one.dp_rank), one.counts), seconds) for one in state.sources)


def _figures(source: Followed, then: dict[str, int], seconds: float) -> SourceFigures:
    def rate(key: str) -> float:
        return max(0.0, (source.counts.get(key, 0) - then.get(key, 0)) / seconds) if seconds > 0 else 0.0

    def count(key: str) -> int:
        return source.counts.get(key, 0)

    return SourceFigures(
        name=source.name,
        dp_rank=source.dp_rank,
        state=source.state,
        age_s=source.age_s,
        behind=count("held"),
        batches_per_s=rate("batches"),
        bytes_per_s=rate("bytes"),
        gaps=count("gaps"),
        orphans=count("orphans"),
        duplicates=count("duplicates"),
        replays=count("replays"),
        resident=source.resident,
    )


def source_table(placed: list[tuple[str, SourceFigures]], *, narrow: bool) -> Table:
    """A line each, with the service that follows it."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("source", overflow="fold")
    shown = {heading: read for heading, read in COLUMNS.items() if not (narrow and heading in WIDE_ONLY)}
    for heading in shown:
        justify: JustifyMethod = "left" if heading == "state" else "right"
        table.add_column(heading, justify=justify, no_wrap=heading != "resident")
    several = len({place for place, _ in placed}) > 1
    for place, found in placed:
        source = escape(found.name.removeprefix("tcp://"))
        name = f"{escape(place)} < {source}" if several else source
        style = {"state": COLORS.get(found.state, "")}
        table.add_row(Text(name), *(Text(read(found), style=style.get(head, "")) for head, read in shown.items()))
    return table
