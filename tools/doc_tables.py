"""The tables in the documentation that are made from the code: options, dialects, metrics, settings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click

_FLAGS = re.compile(r"<!-- flags:(\w+) -->\n(.*?)<!-- /flags -->", re.DOTALL)
_TABLES = {
    name: re.compile(rf"(<!-- {name} -->\n)(.*?)(<!-- /{name} -->)", re.DOTALL)
    for name in ("dialects", "metrics", "settings")
}


def click_command(name: str) -> click.Command | None:
    """A command of the group `kvevents`."""
    from kvevents_service.cli import kvevents

    return kvevents.commands.get(name)


def table(command: click.Command) -> str:
    """The options of a command as a table, with the words of its --help."""
    context = click.Context(command)
    options = (option for option in command.params if isinstance(option, click.Option))
    records = (option.get_help_record(context) for option in options)
    rows = [f"| `{escaped(names)}` | {escaped(text)} |" for names, text in (record for record in records if record)]
    return "\n".join(["| option | meaning |", "|---|---|", *rows]) + "\n"


def escaped(text: str) -> str:
    """A cell may hold no bare pipe, within backticks either; click pads with spaces."""
    return " ".join(text.split()).replace("|", "\\|")


def with_tables(text: str) -> str:
    """The page with every table as it should be. Unknown commands are left as they are."""

    def fresh(found: re.Match[str]) -> str:
        command = click_command(found[1])
        return found[0] if command is None else f"<!-- flags:{found[1]} -->\n{table(command)}<!-- /flags -->"

    text = _FLAGS.sub(fresh, text)
    for name, place in _TABLES.items():
        if place.search(text):
            made = named_table(name)
            text = place.sub(lambda found, made=made: f"{found[1]}{made}{found[3]}", text)
    return text


def named_table(name: str) -> str:
    """The table of dialects, metrics or settings, as the code has them."""
    return {"dialects": dialect_table, "metrics": metric_table, "settings": setting_table}[name]()


def metric_table() -> str:
    from kvevents_service.service.metrics import FAMILIES

    rows = (
        f"| `{family.full_name}` | {family.kind} | {', '.join(family.labels)} | {escaped(family.help)} |"
        for family in FAMILIES
    )
    return "\n".join(["| metric | kind | labels | meaning |", "|---|---|---|---|", *rows]) + "\n"


def setting_table() -> str:
    """Every key of the file, the variable that says the same, its flag if it has one, and its default."""
    import msgspec

    from kvevents_service.config import ServeConfig

    command = click_command("serve")
    flags = {option for param in (command.params if command else ()) for option in param.opts}
    rows = []
    for field in msgspec.structs.fields(ServeConfig):
        flag = f"--{field.name.replace('_', '-')}"
        default = "" if field.default in (msgspec.NODEFAULT, None) else msgspec.json.encode(field.default).decode()
        cells = (field.name, f"KVEVENTS_{field.name.upper()}", flag if flag in flags else "", default)
        rows.append("| " + " | ".join(f"`{cell}`" if cell else "" for cell in cells) + " |")
    return "\n".join(["| key | variable | flag | default |", "|---|---|---|---|", *rows]) + "\n"


def dialect_table() -> str:
    from kvevents_service.cli.dialects import markdown

    return markdown()


def table_faults(path: Path, text: str) -> Iterator[str]:
    for name, shown in _FLAGS.findall(text):
        command = click_command(name)
        if command is None:
            yield f"{path}: there is no command `kvevents {name}`"
        elif shown != table(command):
            yield f"{path}: the options of `kvevents {name}` are stale: run tools/check_docs.py --write"
    if text.count("<!-- flags:") != len(_FLAGS.findall(text)):
        yield f"{path}: a <!-- flags:... --> without its <!-- /flags -->"
    for name, place in _TABLES.items():
        found = [shown for _, shown, _ in place.findall(text)]
        if any(shown != named_table(name) for shown in found):
            yield f"{path}: the table of {name} is stale: run tools/check_docs.py --write"
        if text.count(f"<!-- {name} -->") != len(found):
            yield f"{path}: a <!-- {name} --> without its <!-- /{name} -->"
