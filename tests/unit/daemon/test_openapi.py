"""The document describes what is served: every route, every field, and nothing that is not there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from carma.daemon.api.application import make_app
from carma.wire.api_types import SubmitRequest, TaskView
from carma.wire.openapi import document
from carma.wire.routes import API, BY_NAME, ROUTES
from tests.unit.daemon.api_server import serving
from tests.unit.daemon.shells import check_in_process


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document()["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def references(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_it_is_openapi_3_1_and_plain_json() -> None:
    made = document()
    assert made["openapi"] == "3.1.0"
    assert {"title", "version"} <= made["info"].keys()
    assert json.loads(json.dumps(made)) == made


def test_every_route_is_an_operation_and_no_other() -> None:
    described = {(path, method.upper(), operation["operationId"]) for path, method, operation in operations()}
    assert described == {(API + route.path, route.method, route.name) for route in ROUTES}


def test_every_reference_leads_somewhere_and_every_schema_is_used() -> None:
    made = document()
    found = set(references(made))
    schemas = made["components"]["schemas"]
    assert {name.removeprefix("#/components/schemas/") for name in found} == set(schemas)


def test_every_operation_has_its_parameters_answer_and_errors() -> None:
    for path, _, operation in operations():
        in_path = {entry["name"] for entry in operation["parameters"] if entry["in"] == "path"}
        assert in_path == set(re.findall(r"{(\w+)}", path))
        route = BY_NAME[operation["operationId"]]
        in_query = {entry["name"] for entry in operation["parameters"] if entry["in"] == "query"}
        assert in_query == {query.name for query in route.query}
        assert set(operation["responses"]) == {str(route.status), "default"}
        assert ("requestBody" in operation) == (route.request is not None)
        assert operation["summary"]


@pytest.mark.parametrize(("name", "kind"), [("TaskView", TaskView), ("SubmitRequest", SubmitRequest)])
def test_fields_are_those_of_the_types(name: str, kind: type) -> None:
    schema = document()["components"]["schemas"][name]
    assert set(schema["properties"]) == set(kind.__struct_fields__)  # type: ignore[attr-defined]


def test_the_application_serves_exactly_the_table() -> None:
    with serving(gpus=0) as served:
        app = make_app(served.shell, served.estimates, check_in_process)
        served_routes = {
            (route.path, method)  # type: ignore[attr-defined]
            for route in app.routes
            for method in route.methods  # type: ignore[attr-defined]
            if method != "HEAD"
        }
        assert served_routes == {(API + route.path, route.method) for route in ROUTES}
        assert served.client().openapi() == document()
