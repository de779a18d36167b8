"""The checker of the documentation, on tiny pages."""

import re
import sys
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tools"))

import check_docs  # noqa: E402
import doc_tables  # noqa: E402

PAGE = Path("docs/page.md")


def python(*bodies: str) -> str:
    return "# Title\n\n" + "\ntext\n".join(f"```python\n{body}\n```\n" for body in bodies)


def console(*lines: str) -> str:
    return "\n".join(["```console", *lines, "```", ""])


def python_faults(text: str, timeout_s: float = 60.0) -> list[str]:
    return list(check_docs.python_faults(PAGE, text, timeout_s))


def test_blocks_of_a_page_share_their_names() -> None:
    assert python_faults(python("x = 1", "assert x == 1")) == []


def test_a_failing_block_is_found_with_its_own_line() -> None:
    text = python("x = 1", "assert x == 2")
    (fault,) = python_faults(text)
    line = text.splitlines().index("assert x == 2") + 1
    assert "docs/page.md" in fault
    assert f'page.md", line {line}' in fault
    assert "AssertionError" in fault


def test_a_block_that_does_not_end_is_found() -> None:
    (fault,) = python_faults(python("import threading", "threading.Event().wait()"), 0.5)
    assert "had not ended after 0.5 s" in fault


def test_blocks_run_in_a_directory_of_their_own() -> None:
    assert python_faults(python("open('left-over', 'w').close()")) == []
    assert not Path("left-over").exists()


def test_a_page_without_python_runs_nothing() -> None:
    assert python_faults("```sh\nexit 1\n```\n", 0.0) == []


@pytest.mark.parametrize(
    ("words", "cheap"),
    [
        ("kvevents --help", True),
        ("kvevents serve --help", True),
        ("kvevents --version", True),
        ("kvevents tail --input proto/vectors/layouts.jsonl --json", True),
        ("kvevents tail --json --input proto/vectors/layouts.jsonl", True),
        ("kvevents tail --input x | sh", False),
        ("kvevents tail --input x; rm y", False),
        ("kvevents tail tcp://127.0.0.1:5557", False),
        ("kvevents dialects", True),
        ("kvevents dialects --json", True),
        ("kvevents serve", False),
        ("kvevents demo", False),
        ("rm --help", False),
    ],
)
def test_only_cheap_commands_run(words: str, cheap: bool) -> None:
    assert bool(check_docs.CHEAP.fullmatch(words)) is cheap


VERSION = "kvevents --version"


def real_version() -> str:
    from importlib.metadata import version

    return f"kvevents, version {version('kvevents-service')}"


@pytest.mark.parametrize("shown", [[], [f"{real_version()}   "], ["..."], [real_version(), ""]])
def test_output_as_it_is_passes(shown: list[str]) -> None:
    assert list(check_docs.console_faults(PAGE, console(f"$ {VERSION}", *shown))) == []


@pytest.mark.parametrize(
    ("shown", "what"), [(["version 0"], "another line"), ([real_version(), "more"], "prints 1 lines")]
)
def test_other_output_is_found(shown: list[str], what: str) -> None:
    (fault,) = check_docs.console_faults(PAGE, console("$ kvevents demo", f"$ {VERSION}", *shown))
    assert fault.startswith("docs/page.md:3: ")
    assert what in fault


def test_a_failing_command_is_found() -> None:
    (fault,) = check_docs.console_faults(PAGE, console("$ kvevents nothing --help"))
    assert "failed (exit 2)" in fault


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("# One `two`, three\n\n## Again\n## Again\n```\n## Not one\n```\n")
    return tmp_path


@pytest.mark.parametrize(
    "link", ["page.md", "#one-two-three", "page.md#again-1", "../docs", "https://x.invalid/y", "mailto:a@b"]
)
def test_a_link_that_leads_somewhere_passes(root: Path, link: str) -> None:
    text = f"# One `two`, three\n[a]({link})\n"
    assert list(check_docs.link_faults(PAGE, text, root)) == []


@pytest.mark.parametrize(
    "link", ["absent.md", "../page.md", "page.md#again-2", "#not-one", 'absent.md "with a title"', "<absent.md>"]
)
def test_a_broken_link_is_found(root: Path, link: str) -> None:
    (fault,) = check_docs.link_faults(PAGE, f"text\n[a]({link})\n", root)
    assert fault.startswith("docs/page.md:2: no ")


def test_a_broken_reference_is_found(root: Path) -> None:
    assert list(check_docs.link_faults(PAGE, "[a]\n\n[a]: absent.md\n", root))


def test_links_in_code_are_no_links(root: Path) -> None:
    assert list(check_docs.link_faults(PAGE, "`[a](absent.md)`\n```\n[a](absent.md)\n```\n", root)) == []


@click.command()
@click.option("--size", metavar="N", help="How much | many.")
@click.option("--level", type=click.Choice(["low", "high"]), help="Which.")
@click.argument("place")
def tiny(size: str, level: str, place: str) -> None:
    """A command."""


TABLE = (
    "| option | meaning |\n|---|---|\n| `--size N` | How much \\| many. |\n| `--level [low\\|high]` | Which. |\n"
)


def flags(body: str, name: str = "tiny") -> str:
    return f"before\n<!-- flags:{name} -->\n{body}<!-- /flags -->\nafter\n"


@pytest.fixture
def one_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doc_tables, "click_command", {"tiny": tiny}.get)


@pytest.mark.usefixtures("one_command")
def test_a_stale_table_is_found_and_written_anew() -> None:
    assert list(doc_tables.table_faults(PAGE, flags(TABLE))) == []
    (fault,) = doc_tables.table_faults(PAGE, flags("| old |\n"))
    assert "are stale" in fault
    assert doc_tables.with_tables(flags("| old |\n")) == flags(TABLE)


@pytest.mark.usefixtures("one_command")
def test_a_table_of_no_command_is_found() -> None:
    (fault,) = doc_tables.table_faults(PAGE, flags("", "nothing"))
    assert "no command `kvevents nothing`" in fault


def test_a_table_that_is_not_closed_is_found() -> None:
    (fault,) = doc_tables.table_faults(PAGE, "<!-- flags:serve -->\n| old |\n")
    assert "without its" in fault


def test_the_real_commands_have_tables() -> None:
    for name in ("serve", "tail"):
        assert doc_tables.table(doc_tables.click_command(name)).count("\n| `--") > 5


def test_all_pages_are_read_and_hidden_ones_are_not(root: Path) -> None:
    (root / ".venv").mkdir()
    (root / ".venv" / "x.md").touch()
    (root / "README.md").touch()
    assert check_docs.pages(root) == [Path("README.md"), PAGE]


def test_everything_is_listed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = python("assert False") + console(f"$ {VERSION}", "no") + "[a](absent.md)\n" + "<!-- flags:nothing -->\n"
    (root / "docs" / "page.md").write_text(page)
    assert len(list(check_docs.faults(root))) == 4
    assert capsys.readouterr().out == ""


def test_an_unknown_argument_is_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_docs.main(["--wirte"]) == 2
    assert "--write" in capsys.readouterr().err


# the table of dialects


TABLES = ("dialects", "metrics", "settings")


def table_page(name: str, table: str) -> str:
    return f"# Title\n\n<!-- {name} -->\n{table}<!-- /{name} -->\n"


@pytest.mark.parametrize("name", TABLES)
def test_a_stale_table_of_the_code_is_found_and_written_anew(name: str) -> None:
    fresh = doc_tables.with_tables(table_page(name, "| old |\n"))
    assert fresh == table_page(name, doc_tables.named_table(name))
    assert list(doc_tables.table_faults(PAGE, fresh)) == []
    (fault,) = doc_tables.table_faults(PAGE, table_page(name, "| old |\n"))
    assert f"table of {name} is stale" in fault


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_the_code_has_an_end(name: str) -> None:
    (fault,) = doc_tables.table_faults(PAGE, f"<!-- {name} -->\n")
    assert f"without its <!-- /{name} -->" in fault


def test_what_operators_are_told_to_look_at_is_there() -> None:
    """Every metric that the page of operations names."""
    from kvevents_service.service.metrics import FAMILIES

    page = (check_docs.ROOT / "docs" / "operations.md").read_text()
    named = set(re.findall(r"\bkvevents_[a-z_]+[a-z]", page)) - {"kvevents_service"}
    assert named == {family.full_name for family in FAMILIES}
