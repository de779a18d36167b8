"""Types of options that several commands have."""

from __future__ import annotations

import click

from kvevents_service.sizes import EXPECTED, parse_size


class Size(click.ParamType[int]):
    """Bytes, with a unit or without."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value)
        size = int(text) if text.lstrip("-").isdecimal() and text.isascii() else parse_size(text)
        return self.fail(f"expected {EXPECTED}, not {text!r}", param, ctx) if size is None else size


SIZE = Size()
