"""The committed schemas are what the structs give, and say what matters about them."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("make_schema", ROOT / "tools" / "make_schema.py")
make_schema = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_schema)


def test_the_committed_schemas_are_current() -> None:
    assert make_schema.stale() == []
    assert make_schema.main(["--check"]) == 0


def test_a_changed_or_missing_file_is_stale(tmp_path: Path) -> None:
    assert make_schema.stale(tmp_path) == list(make_schema.SOURCES)
    (tmp_path / "events.json").write_text("{}")
    assert "events.json" in make_schema.stale(tmp_path)


def test_an_unknown_argument_is_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert make_schema.main(["--chekc"]) == 2
    assert "--check" in capsys.readouterr().err


def test_no_file_is_left_over() -> None:
    assert {path.name for path in make_schema.DIRECTORY.glob("*.json")} == set(make_schema.SOURCES)


def test_the_event_schema_says_what_is_required() -> None:
    definitions = json.loads((make_schema.DIRECTORY / "events.json").read_text())["$defs"]
    stored = definitions["BlockStored"]
    assert stored["required"][:2] == ["type", "block_hashes"]
    assert "extra_keys" not in stored["required"]
    assert stored["properties"]["type"] == {"enum": ["BlockStored"]}
    assert definitions["EventBatch"]["type"] == "array"
    assert definitions["EventBatch"]["minItems"] == 2
