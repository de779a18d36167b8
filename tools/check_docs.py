#!/usr/bin/env python3
"""Check that the documentation is true: its code runs, its output is real, its links lead somewhere.

python tools/check_docs.py            check; exit 1 with a list of what is wrong
python tools/check_docs.py --write    first write these tables anew, from the commands

What is checked:
  README.md, docs/*.md   ```python blocks run, those of one file as one program, in a directory of their own;
                         ```console lines "$ kvevents ..." of a cheap kind (`CHEAP`) print what stands below them,
                         where something does; a last line "..." stands for the rest
  every *.md             tables between <!-- flags:COMMAND --> and <!-- /flags --> are those of the commands
  every *.md             the tables between <!-- dialects --> and <!-- /dialects -->, and likewise of metrics and
                         settings, are what the code has
  every *.md             relative links and #anchors lead to a file and a heading
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from doc_tables import table_faults, with_tables

ROOT = Path(__file__).resolve().parents[1]
PYTHON_TIMEOUT_S = 120
CONSOLE_TIMEOUT_S = 60
REST = "..."
SKIPPED_FOLDERS = {"node_modules", "build"}

CHEAP = re.compile(
    r"kvevents( \w+)? (--help|-h|--version)|kvevents dialects( --json)?|"
    r"kvevents tail --input [^|&;<>$`]*|kvevents tail .* --input [^|&;<>$`]*"
)
"""Commands that are run: they need no service and end at once."""

_FENCE = re.compile(r"^(```+|~~~+) *([\w-]*)")
_INLINE_CODE = re.compile(r"`[^`]*`")
_LINK = re.compile(r"\[[^\]]*\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)|^\[[^\]]+\]: *(\S+)", re.MULTILINE)


class Block(NamedTuple):
    """A fenced block: its language, the number of its first line within the file, its lines."""

    language: str
    line: int
    lines: list[str]


class Command(NamedTuple):
    """A "$ ..." line of a console block, and the output shown below it."""

    line: int
    words: str
    shown: list[str]


# reading Markdown


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a page."""
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        fence = _FENCE.match(line)
        if fence:
            yield Block(fence[2], number + 1, until(fence[1], lines))


def until(mark: str, lines: Iterator[tuple[int, str]]) -> list[str]:
    """The lines before the closing fence, which is taken as well."""
    return [line for _, line in takewhile(lambda pair: pair[1].rstrip() != mark, lines)]


def without_blocks(text: str) -> str:
    """The page with every fenced block and `code` emptied, lines kept."""
    lines = text.splitlines()
    for block in blocks(text):
        for number in range(block.line - 1, block.line - 1 + len(block.lines)):
            lines[number] = ""
    return _INLINE_CODE.sub("", "\n".join(lines))


def commands(block: Block) -> Iterator[Command]:
    """The commands of a console block."""
    starts = [i for i, line in enumerate(block.lines) if line.startswith("$ ")]
    for start, stop in zip(starts, [*starts[1:], len(block.lines)], strict=True):
        yield Command(block.line + start, block.lines[start][2:].strip(), stripped(block.lines[start + 1 : stop]))


def stripped(lines: list[str]) -> list[str]:
    """Lines without trailing spaces, without empty ones at the end."""
    return "\n".join(line.rstrip() for line in lines).rstrip().splitlines()


# python blocks


def program(text: str) -> str:
    """The python blocks of a page as one program, every line at its own number."""
    lines = [""] * len(text.splitlines())
    for block in blocks(text):
        if block.language == "python":
            lines[block.line - 1 : block.line - 1 + len(block.lines)] = block.lines
    return "\n".join(lines).rstrip() + "\n"


def python_faults(path: Path, text: str, timeout_s: float = PYTHON_TIMEOUT_S) -> Iterator[str]:
    """Run a page's python blocks. Their paths are those of a new directory, which is removed afterwards."""
    source = program(text)
    if not source.strip():
        return
    with tempfile.TemporaryDirectory(prefix="kvdocs-") as folder:
        script = Path(folder) / path.name
        script.write_text(source, encoding="utf-8")
        try:
            done = subprocess.run(
                [sys.executable, script.name], cwd=folder, env=environment(), capture_output=True, text=True,
                timeout=timeout_s, check=False, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            yield f"{path}: its python blocks had not ended after {timeout_s:g} s"
            return
    if done.returncode:
        yield f"{path}: its python blocks failed (exit {done.returncode})\n{indented(done.stderr)}"


def environment() -> dict[str, str]:
    """Our own commands first; no colours, no time zone, a fixed width: the output is the same everywhere."""
    scripts = sysconfig.get_path("scripts")
    fixed = {"NO_COLOR": "1", "TZ": "UTC", "COLUMNS": "100", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **fixed, "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}"}


def indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.rstrip().splitlines())


# console blocks


def console_faults(path: Path, text: str) -> Iterator[str]:
    """Run the cheap commands of a page's console blocks, at the root of the repository."""
    for block in blocks(text):
        if block.language == "console":
            for command in commands(block):
                if CHEAP.fullmatch(command.words):
                    yield from command_faults(path, command)


def command_faults(path: Path, command: Command) -> Iterator[str]:
    """What is shown below a command must be its output; where nothing is, it must only succeed."""
    place = f"{path}:{command.line}: `{command.words}`"
    try:
        done = subprocess.run(
            shlex.split(command.words), cwd=ROOT, env=environment(), capture_output=True, text=True,
            timeout=CONSOLE_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        yield f"{place} could not be run: {error}"
        return
    if command.shown:
        yield from difference(place, command.shown, stripped(done.stdout.splitlines()))
    elif done.returncode:
        yield f"{place} failed (exit {done.returncode})\n{indented(done.stderr)}"


def difference(place: str, shown: list[str], real: list[str]) -> Iterator[str]:
    """The first line that differs."""
    if shown[-1] == REST:
        shown = shown[:-1]
        real = real[: len(shown)]
    for want, got in zip(shown, real, strict=False):
        if want != got:
            yield f"{place} prints another line\n    page: {want}\n    real: {got}"
            return
    if len(shown) != len(real):
        yield f"{place} prints {len(real)} lines, the page shows {len(shown)}"


# links


def anchors(text: str) -> set[str]:
    """The anchors GitHub makes of the headings."""
    found: set[str] = set()
    for line in without_fences(text).splitlines():
        if re.match(r"#{1,6} ", line):
            title = re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower()).replace(" ", "-")
            found.add(next(name for name in numbered(title) if name not in found))
    return found


def without_fences(text: str) -> str:
    """The page with every fenced block emptied; `code` in headings counts."""
    inside = {n for block in blocks(text) for n in range(block.line, block.line + len(block.lines))}
    return "\n".join("" if number in inside else line for number, line in enumerate(text.splitlines(), 1))


def numbered(title: str) -> Iterator[str]:
    yield title
    yield from (f"{title}-{count}" for count in range(1, 1000))


def link_faults(path: Path, text: str, root: Path = ROOT) -> Iterator[str]:
    """Relative links whose file or heading is not there. `path` is relative to `root`."""
    plain = without_blocks(text)
    for match in _LINK.finditer(plain):
        target = match[1] or match[2]
        if not re.match(r"[a-z][a-z0-9+.-]*:|//", target):
            line = plain.count("\n", 0, match.start()) + 1
            yield from target_faults(f"{path}:{line}", root / path, target)


def target_faults(place: str, page: Path, target: str) -> Iterator[str]:
    name, _, anchor = unquote(target).partition("#")
    file = page.parent / name if name else page
    if not file.exists():
        yield f"{place}: no {name}"
    elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text(encoding="utf-8")):
        yield f"{place}: no heading #{anchor} in {file.name}"


# all of it


def pages(root: Path = ROOT) -> list[Path]:
    """Every Markdown file, relative to the root, outside of hidden and built folders."""
    found = (path.relative_to(root) for path in root.rglob("*.md"))
    return sorted(
        path for path in found if not any(p.startswith(".") or p in SKIPPED_FOLDERS for p in path.parts[:-1])
    )


def runs(path: Path) -> bool:
    """Whether a page's code is run."""
    return path == Path("README.md") or path.parts[0] == "docs"


def faults(root: Path = ROOT) -> Iterator[str]:
    """Everything that is wrong."""
    for path in pages(root):
        text = (root / path).read_text(encoding="utf-8")
        yield from link_faults(path, text, root)
        yield from table_faults(path, text)
        if runs(path):
            sys.stderr.write(f"check_docs: {path}\n")
            yield from python_faults(path, text)
            yield from console_faults(path, text)


def write_tables(root: Path = ROOT) -> None:
    for path in pages(root):
        text = (root / path).read_text(encoding="utf-8")
        fresh = with_tables(text)
        if fresh != text:
            (root / path).write_text(fresh, encoding="utf-8")
            sys.stderr.write(f"check_docs: {path} written\n")


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--write"]):
        sys.stderr.write(__doc__ or "")
        return 2
    if arguments:
        write_tables()
    count = 0
    for count, fault in enumerate(faults(), 1):  # noqa: B007 - the last number is used below
        sys.stdout.write(f"{fault}\n")
    sys.stderr.write(f"check_docs: {count} faults\n" if count else "check_docs: fine\n")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
