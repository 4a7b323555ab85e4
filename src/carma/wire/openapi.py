"""The route table as an OpenAPI 3.1 document."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import msgspec

import carma
from carma.core.model.values import LARGEST_ID
from carma.errors import every
from carma.wire import api_types as t
from carma.wire.routes import API, ROUTES, Query, Route

_REF = "#/components/schemas/{name}"
_STREAMS = {"logs": "application/octet-stream", "events": "text/event-stream"}
_WHO = {
    "anyone": "Every user of the daemon. Commands of other users' tasks are left out.",
    "owner": "The task's owner, or an administrator.",
    "admin": "Administrators: root, the daemon's own user, and those in the setting daemon.admins.",
}


@cache
def document() -> dict[str, Any]:
    """The whole document, computed once. The caller must not change it."""
    schemas, components = _schemas()
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(API + route.path, {})[route.method.lower()] = _operation(route, schemas)
    made = {
        "openapi": "3.1.0",
        "info": {
            "title": "CARMA",
            "version": carma.__version__,
            "description": "HTTP on a Unix socket. The daemon identifies the user by the socket (SO_PEERCRED); "
            "there is no login. Times are seconds since 1970, UTC. Every error answer is a Problem.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {"schemas": components},
    }
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(made))  # defaults that are tuples become lists
    return plain


def _schemas() -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The schemas of requests and answers as "name.request" and "name.answer", and all components."""
    wanted: dict[str, Any] = {}
    for route in ROUTES:
        if route.request is not None:
            wanted[f"{route.name}.request"] = route.request
        if route.answer is not None:
            wanted[f"{route.name}.answer"] = route.answer
    wanted["event"] = t.StreamEvent
    wanted["problem"] = t.Problem
    made, components = msgspec.json.schema_components(wanted.values(), ref_template=_REF)
    return dict(zip(wanted, made, strict=True)), components


def _operation(route: Route, schemas: dict[str, dict[str, Any]]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "description": _WHO[route.who],
        "parameters": [*_path_parameters(route), *(_query_parameter(query) for query in route.query)],
        "responses": {
            str(route.status): _answer(route, schemas),
            "default": {
                "description": "An error: "
                + ", ".join(sorted({f"{kind.code} ({kind.http_status})" for kind in every()})),
                "content": {"application/json": {"schema": schemas["problem"]}},
            },
        },
    }
    if route.request is not None:
        content = {"application/json": {"schema": schemas[f"{route.name}.request"]}}
        operation["requestBody"] = {"required": route.name == "submit", "content": content}
    return operation


def _answer(route: Route, schemas: dict[str, dict[str, Any]]) -> dict[str, Any]:
    if route.name in _STREAMS:
        schema = schemas["event"] if route.name == "events" else {"type": "string", "format": "binary"}
        return {"description": route.summary, "content": {_STREAMS[route.name]: {"schema": schema}}}
    answer = {
        "description": route.summary,
        "content": {"application/json": {"schema": schemas[f"{route.name}.answer"]}},
    }
    if route.header is not None:
        header = {"description": route.header.description, "schema": {"type": "string"}}
        return {**answer, "headers": {route.header.name: header}}
    return answer


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "integer", "minimum": 1, "maximum": LARGEST_ID},
        }
        for name in re.findall(r"{(\w+)}", route.path)
    ]


def _query_parameter(query: Query) -> dict[str, Any]:
    return {
        "name": query.name,
        "in": "query",
        "required": False,
        "description": query.description,
        "schema": msgspec.json.schema(query.kind),
    }
