"""The reference page of the HTTP API, from the route table and the wire types."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator

import msgspec

from carma.core.model.values import TaskSpec
from carma.wire import openapi
from carma.wire.api_types import Problem, StreamEvent
from carma.wire.routes import API, ROUTES, Route
from tools.markdown import GENERATED, code, paragraphs, table

INTRODUCTION = f"""\
# API

The daemon serves HTTP/1.1 with JSON on a Unix socket; version 1 is below `{API}`. There is no login and no TCP: the
kernel identifies the user at the other end of the socket. [openapi.json](openapi.json) describes the same API, and the
daemon serves it at `{API}/openapi.json`.

```
curl --unix-socket "$CARMA_HOME/carma.sock" http://carma{API}/tasks
```

New versions add fields and never rename them. A request with an unknown field is refused; an answer may have more
fields than listed here. Times are seconds since 1970, UTC. Every error is a [Problem](#problem) with its HTTP status,
see [errors](errors.md). In Python, `carma.client.Client` has a method for each route.
"""


def page() -> str:
    rows = [
        [f"[`{route.name}`](#{route.name})", code(f"{route.method} {API}{route.path}"), route.who, route.summary]
        for route in ROUTES
    ]
    parts = [GENERATED, INTRODUCTION, "## Routes\n", table(["name", "route", "who", "purpose"], rows)]
    parts.append("".join(f"- *{who}*: {text}\n" for who, text in _rights().items()))
    for route in ROUTES:
        parts.extend(_route(route))
    parts.append("## Types\n")
    for kind in _types():
        parts.extend(_struct(kind))
    return "\n".join(parts)


def _rights() -> dict[str, str]:
    """The permitted users, in the words of the OpenAPI document."""
    paths = openapi.document()["paths"]
    return {route.who: paths[API + route.path][route.method.lower()]["description"] for route in ROUTES}


def _route(route: Route) -> Iterator[str]:
    yield f"### {route.name}\n"
    yield f"{code(f'{route.method} {API}{route.path}')}: {route.summary}\n"
    if route.query:
        yield table(["query", "type", "meaning"], [[code(q.name), shown(q.kind), q.description] for q in route.query])
    body = shown(route.request) if route.request is not None else "no body"
    yield f"Request: {body}. Answer: {_answer(route)} ({route.status}).\n"
    if route.header is not None:
        yield f"Header of the answer: {code(route.header.name)}, {route.header.description}\n"


def _answer(route: Route) -> str:
    if route.answer is not None:
        return shown(route.answer)
    return "a stream of " + (f"{shown(StreamEvent)} (server-sent events)" if route.name == "events" else "bytes")


def _types() -> list[type[msgspec.Struct]]:
    """Every struct that a route uses, directly or in another struct."""
    found: dict[type[msgspec.Struct], None] = {}
    waiting: list[object] = [kind for route in ROUTES for kind in (route.request, route.answer)]
    waiting += [StreamEvent, Problem]
    while waiting:
        kind = waiting.pop(0)
        if _is_struct(kind) and kind not in found:
            found[kind] = None
            waiting[:0] = [field.type for field in msgspec.structs.fields(kind)]
        waiting[:0] = list(typing.get_args(kind))
    return list(found)


def _is_struct(kind: object) -> typing.TypeGuard[type[msgspec.Struct]]:
    return isinstance(kind, type) and not typing.get_args(kind) and issubclass(kind, msgspec.Struct)


def _struct(kind: type[msgspec.Struct]) -> Iterator[str]:
    yield f"### {kind.__name__}\n"
    about = paragraphs(kind.__dict__.get("__doc__"))
    if about:
        yield about + "\n"
    fields = msgspec.structs.fields(kind)
    yield table(["field", "type", "default"], [[code(f.encode_name), shown(f.type), _default(f)] for f in fields])
    if kind is TaskSpec:
        yield "`carma submit` sets the fields; `directory` must be absolute.\n"


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return code(msgspec.json.encode(value).decode())


def _bounds(meta: msgspec.Meta) -> str:
    limits = (("from ", meta.ge), ("up to ", meta.le))
    said = [
        f"{word}{limit:g}" if isinstance(limit, float) else f"{word}{limit}"
        for word, limit in limits
        if limit is not None
    ]
    return f", {' '.join(said)}" if said else ""


def shown(kind: object) -> str:
    """A type in words, structs as links."""
    if kind is None or kind is type(None):
        return "null"
    if kind is Ellipsis:
        return "…"
    if _is_struct(kind):
        return f"[{kind.__name__}](#{kind.__name__.lower()})"
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return shown(arguments[0]) + _bounds(arguments[1])
    if isinstance(kind, typing.NewType):
        return shown(kind.__supertype__)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(shown(argument) for argument in arguments)
    if origin is typing.Literal:
        return " or ".join(code(str(argument)) for argument in arguments)
    if origin in (tuple, list):
        return "list of " + shown(arguments[0])
    if origin is dict:
        return "object" if arguments[1] is typing.Any else f"object of {shown(arguments[1])}"
    return {"str": "text", "int": "integer", "float": "number", "bool": "true or false", "Any": "anything"}.get(
        getattr(kind, "__name__", str(kind)), str(getattr(kind, "__name__", kind))
    )
