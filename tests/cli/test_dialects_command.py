"""`kvevents dialects`: the table and its JSON, from the declarations."""

import json
import subprocess
import sys

import msgspec
import pytest
from click.testing import CliRunner

from kvevents_service.cli import kvevents
from kvevents_service.cli.dialects import COLUMNS, markdown, rows
from kvevents_service.wire.dialects import DIALECTS, Dialect


def printed(*options: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "kvevents_service", "dialects", *options],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_a_line_for_each_dialect_below_a_head() -> None:
    head, *lines = printed()
    assert head.split("  ")[0] == "DIALECT"
    assert [line.split()[0] for line in lines] == list(DIALECTS)
    starts = [head.index(column.upper()) for column in COLUMNS]
    for line, row in zip(lines, rows(), strict=True):
        assert [line[start : start + len(cell)] for start, cell in zip(starts, row, strict=True)] == list(row)


def test_json_is_the_whole_declaration() -> None:
    lines = printed("--json")
    assert [msgspec.json.decode(line, type=Dialect) for line in lines] == [*DIALECTS.values()]
    assert json.loads(lines[3])["hashes"] == "low 63, >= 2^32"


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("vllm", ("maps, runs", "low 64, unsigned", "all", "all, inner hashes", "as given")),
        ("aibrix", ("arrays of 8, one block", "high 64, signed", "GPU", "main", "none")),
        ("sglang", ("maps, runs", "low 64, signed", "GPU CPU_PINNED DISK EXTERNAL", "main", "none")),
    ],
)
def test_a_row_says_what_is_declared(name: str, row: tuple[str, ...]) -> None:
    assert rows()[list(DIALECTS).index(name)] == (name, *row, DIALECTS[name].readers)


def test_the_markdown_has_the_same_cells() -> None:
    lines = markdown().splitlines()
    assert lines[0] == f"| {' | '.join(COLUMNS)} |"
    assert lines[2:] == [f"| `{name}` | {' | '.join(cells)} |" for name, *cells in rows()]


def test_a_reader_that_leaves_is_no_failure() -> None:
    command = f"{sys.executable} -m kvevents_service dialects --json | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_bad_usage() -> None:
    assert CliRunner().invoke(kvevents, ["dialects", "--nope"]).exit_code == 2
