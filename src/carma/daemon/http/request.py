"""From bytes to a typed call, and from an answer or an error to bytes. Knows the route table, not the state."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from carma.core.model.values import LARGEST_ID, TaskId
from carma.daemon.auth import Authenticator, Identity, Peer, require_admin
from carma.errors import CarmaError, NotAllowed, NotFound, TooLarge, Usage
from carma.wire.api_types import Problem
from carma.wire.routes import Query, Route

log = logging.getLogger("carma.http")
MIB = 1024 * 1024
_encode = msgspec.json.Encoder().encode


class ApiCall(msgspec.Struct, frozen=True, kw_only=True):
    """A valid request from a known user."""

    route: Route
    who: Identity
    query: dict[str, Any]
    task: TaskId = TaskId(0)  # for routes with an id
    body: Any = None  # an instance of the route's request type


Handler = Callable[[ApiCall], Awaitable[object]]


def endpoint(
    route: Route, handler: Handler, authenticator: Authenticator, max_bytes: int
) -> Callable[[Request], Awaitable[Response]]:
    """What starlette calls. Every result is an answer: a typed one, a stream, or a Problem."""

    async def serve(request: Request) -> Response:
        try:
            answer = await handler(await read_call(request, route, authenticator, max_bytes))
        except CarmaError as error:
            return problem(error)
        except ClientDisconnect:
            return Response(status_code=400)  # no client reads it
        except Exception as error:
            log.exception("%s failed", route.name)
            return problem(
                CarmaError(f"the daemon failed on {route.name}: {type(error).__name__}", "its log has the details")
            )
        if isinstance(answer, Response):
            return answer
        return Response(_encode(answer), route.status, media_type="application/json")

    return serve


def problem(error: CarmaError) -> Response:
    body = _encode(Problem(code=error.code, message=str(error), hint=error.hint))
    # The rest of a body that was not read would be taken for the next request.
    headers = {"connection": "close"} if isinstance(error, TooLarge) else None
    return Response(body, error.http_status, headers, media_type="application/json")


async def read_call(request: Request, route: Route, authenticator: Authenticator, max_bytes: int) -> ApiCall:
    peer: Peer | None = request.scope["state"].get("peer")
    if peer is None:
        raise NotAllowed("the kernel did not say who you are")
    who = authenticator.identify(peer)
    if route.who == "admin":
        require_admin(who, route.name)
    raw = await read_body(request, max_bytes) if route.method != "GET" else b""
    return ApiCall(
        route=route,
        who=who,
        query=read_query(request, route.query),
        task=read_id(request.path_params["id"]) if "id" in request.path_params else TaskId(0),
        body=decode(raw, route) if route.request is not None else None,
    )


async def read_body(request: Request, max_bytes: int) -> bytes:
    """At most `max_bytes` are ever in memory; a larger body is refused as soon as its size is known."""
    announced = request.headers.get("content-length", "")
    too_large = TooLarge(
        f"the request is larger than {max_bytes // MIB} MiB",
        "put data in files; the setting daemon.max_request_mib is the limit",
    )
    if announced.isascii() and announced.isdigit() and int(announced[:20]) > max_bytes:
        raise too_large
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)


def decode(raw: bytes, route: Route) -> Any:
    """The request's struct; an empty body is a struct with nothing set."""
    try:
        return msgspec.json.decode(raw or b"{}", type=route.request, strict=True)
    except msgspec.ValidationError as error:
        raise Usage(f"{route.name}: {error}", "the API reference has the fields of each request") from error
    except UnicodeDecodeError as error:
        raise Usage(
            f"{route.name}: the request holds text that is not UTF-8: {error}",
            "a directory, file or argument whose name is in another encoding cannot be used; rename it",
        ) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise Usage(f"{route.name}: the body is not JSON: {error}") from error


def read_id(text: str) -> TaskId:
    if text.isascii() and text.isdigit() and len(text) <= 19 and 0 < int(text) <= LARGEST_ID:
        return TaskId(int(text))
    raise NotFound(f"there is no task {text[:40]!r}", "a task id is a number; `carma queue` lists them")


def read_query(request: Request, known: tuple[Query, ...]) -> dict[str, Any]:
    kinds = {query.name: query.kind for query in known}
    found: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        if name not in kinds:
            names = ", ".join(kinds) or "none"
            raise Usage(f"unknown query parameter {name[:40]!r}", f"this route has: {names}")
        try:
            found[name] = msgspec.convert(value, kinds[name], strict=False)
        except msgspec.ValidationError as error:
            raise Usage(f"query parameter {name}={value[:40]!r}: {error}") from error
    return found
