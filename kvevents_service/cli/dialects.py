"""`kvevents dialects`: the ways a batch can be written, one line each, from their declarations."""

from __future__ import annotations

from collections.abc import Iterator

import click
import msgspec

from kvevents_service.cli.terminal import discard_stdout, write
from kvevents_service.wire.dialects import DIALECTS, Dialect, Groups, Layout

COLUMNS = ("dialect", "events", "hash", "media", "groups", "extra keys", "for")


@click.command(short_help="List the ways the stream can be written.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, with every word of a declaration.")
def dialects(as_json: bool) -> int:
    """List the dialects an output can speak.

    \b
    events      maps or arrays; a run of blocks each, or one block
    hash        the bits of the engine's hash that name a block
    media       the tiers that are told of, by their names there
    groups      "all", or "main": only those of full attention, as if there were no others
    extra keys  of images and salts: as the engine gave them, in plain shapes, or none
    """
    lines = json_lines() if as_json else text_lines()
    try:
        for line in lines:
            write(line)
    except BrokenPipeError:
        discard_stdout()
    return 0


def rows() -> list[tuple[str, ...]]:
    """A row of COLUMNS for each dialect."""
    return [
        (name, events(it), it.hashes.value, media(it), groups(it), extra_keys(it), it.readers)
        for name, it in DIALECTS.items()
    ]


def events(dialect: Dialect) -> str:
    layout = "maps" if dialect.layout is Layout.MAP else f"arrays of {len(dialect.stored) + 1}"
    return f"{layout}, one block" if dialect.one_hash else f"{layout}, runs"


def media(dialect: Dialect) -> str:
    return "all" if dialect.media is None else " ".join(name for _, name in dialect.media)


def groups(dialect: Dialect) -> str:
    shown = "all" if dialect.groups is Groups.ALL else "main"
    return f"{shown}, inner hashes" if dialect.inner else shown


def extra_keys(dialect: Dialect) -> str:
    if not dialect.says("extra_keys"):
        return "none"
    return "plain" if dialect.plain_extra_keys else "as given"


def text_lines() -> Iterator[str]:
    """The table for a terminal."""
    table = [tuple(column.upper() for column in COLUMNS), *rows()]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def json_lines() -> Iterator[str]:
    return (msgspec.json.encode(dialect).decode() for dialect in DIALECTS.values())


def markdown() -> str:
    """The table as it stands in the documentation."""
    table = [COLUMNS, ("---",) * len(COLUMNS), *((f"`{name}`", *cells) for name, *cells in rows())]
    return "".join(f"| {' | '.join(row)} |\n" for row in table)
