"""The AsyncAPI document is what the code gives, and all that it refers to is there."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from kvevents_service.wire.control import ClientMessage, SidecarMessage

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("make_asyncapi", ROOT / "tools" / "make_asyncapi.py")
make_asyncapi = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_asyncapi)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return json.loads(make_asyncapi.FILE.read_text())


def test_the_committed_document_is_current() -> None:
    assert make_asyncapi.main(["--check"]) == 0
    assert make_asyncapi.main(["--chekc"]) == 2


def references(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            if key == "$ref":
                yield item
            else:
                yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    found = list(references(document))
    assert len(found) > 50
    for reference in found:
        file, _, path = reference.partition("#/")
        place: Any = json.loads((make_asyncapi.FILE.parent / file).read_text()) if file else document
        for key in path.split("/"):
            place = place[key]


def test_every_message_of_the_engine_protocol_is_in_it(document: dict[str, Any]) -> None:
    names = {one.__name__ for one in (*get_args(ClientMessage), *get_args(SidecarMessage))}
    serve = document["operations"]["serveEngine"]
    asked = {item["$ref"].rpartition("/")[2] for item in serve["messages"]}
    told = {item["$ref"].rpartition("/")[2] for item in serve["reply"]["messages"]}
    assert asked == {one.__name__ for one in get_args(ClientMessage)}
    assert asked | told == names
    assert names <= set(document["components"]["messages"])


def test_it_has_the_shape_of_asyncapi_3(document: dict[str, Any]) -> None:
    """Of the specification: what is required, and where operations and messages may refer to."""
    assert document["asyncapi"] == "3.0.0"
    assert {"title", "version"} <= set(document["info"])
    for server in document["servers"].values():
        assert {"host", "protocol"} <= set(server)
    for channel in document["channels"].values():
        assert channel["address"]
        for name, message in channel["messages"].items():
            assert message["$ref"] == f"#/components/messages/{name}"
    for operation in document["operations"].values():
        assert operation["action"] in ("send", "receive")
        assert all(item["$ref"].startswith(operation["channel"]["$ref"] + "/") for item in operation["messages"])
    for parameter in document["channels"]["events"]["parameters"]:
        assert "{" + parameter + "}" in document["channels"]["events"]["address"]
