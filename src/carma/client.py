"""The client of the daemon's API: one method for each route. An error of the daemon is raised as the same class.

Every request has a time limit, except those that follow output or events. A client must be used by one thread only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from os import PathLike, fspath
from typing import Any, NamedTuple, TypeVar

import msgspec

from carma import errors
from carma.transport import Link, Reply
from carma.wire import api_types as t
from carma.wire.report_types import Report, UserView
from carma.wire.routes import API, BY_NAME, CURSOR_HEADER, HISTORY_LIMIT, LIST_LIMIT, OFFSET_HEADER, Route

T = TypeVar("T")
REQUEST_S = 60.0
_WAIT_PIECE_S = 50.0  # a longer wait is several requests, so that a hanging daemon is noticed
_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~")

MOST_LISTED = LIST_LIMIT  # tasks in one answer


class Logs(NamedTuple):
    """A task's output in pieces, and the byte at which they begin (None: unknown)."""

    offset: int | None
    pieces: Iterator[bytes]


def _quote(text: str) -> str:
    return "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in text.encode("utf-8", "replace"))


def _target(route: Route, task: int | None, query: Mapping[str, object]) -> str:
    path = API + (route.path.format(id=task) if task is not None else route.path)
    pairs = [f"{name}={_quote(_text(value))}" for name, value in query.items() if value is not None]
    return path + ("?" + "&".join(pairs) if pairs else "")


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class Client:
    def __init__(self, socket_path: str | PathLike[str], *, timeout_s: float = REQUEST_S) -> None:
        self._link = Link(fspath(socket_path))
        self._timeout_s = timeout_s

    def close(self) -> None:
        self._link.close()

    def interrupt(self) -> None:
        """End the request for which another thread waits: it raises Unreachable there."""
        self._link.interrupt()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def server(self) -> t.ServerView:
        return self._ask("server", t.ServerView)

    def submit(self, request: t.SubmitRequest) -> t.SubmitAnswer:
        return self._ask("submit", t.SubmitAnswer, body=request)

    def tasks(self, *, user: str | None = None, state: str | None = None, limit: int | None = None) -> list[t.TaskView]:
        """Tasks that are not finished: your own, those of `user`, or of all users ("all")."""
        return self._ask("tasks", list[t.TaskView], user=user, state=state, limit=limit)

    def history(
        self, *, user: str | None = None, state: str | None = None, limit: int | None = None, since: float | None = None
    ) -> list[t.TaskView]:
        """Finished tasks, newest first. A limit above one page takes several requests; tasks that end meanwhile do not
        change the following pages."""
        cursor: str | None = None
        found: list[t.TaskView] = []
        while True:
            size = limit if limit is None else min(limit - len(found), HISTORY_LIMIT)
            reply = self._send(
                "history", timeout_s=self._timeout_s, user=user, state=state, since=since, limit=size, cursor=cursor
            )
            cursor = reply.headers.get(CURSOR_HEADER)
            found += _decode(reply, "history", list[t.TaskView])
            if cursor is None or limit is None or len(found) >= limit:
                return found

    def report(self, *, since: float | None = None) -> Report:
        """What the server did since that time (default: within the last 24 hours), from the full hour on."""
        return self._ask("report", Report, since=since)

    def task(self, task: int, *, wait_s: float | None = None) -> t.TaskView:
        """One task. With `wait_s`: when it has finished, or after that many seconds."""
        until = time.monotonic() + (wait_s or 0.0)
        while True:
            piece_s = min(until - time.monotonic(), _WAIT_PIECE_S) if wait_s is not None else 0.0
            wait = round(piece_s, 3) if piece_s > 0 else None
            reply = self._send("task", task, timeout_s=self._timeout_s + max(0.0, piece_s), wait_s=wait)
            view = _decode(reply, "task", t.TaskView)
            if view.state == "finished" or time.monotonic() >= until:
                return view

    def wait(self, task: int, timeout_s: float | None = None) -> t.TaskView:
        """Waits until the task has finished, or for `timeout_s`."""
        return self.task(task, wait_s=1e9 if timeout_s is None else timeout_s)

    def story(self, task: int) -> list[t.StoryLine]:
        return self._ask("story", list[t.StoryLine], task)

    def explain(self, task: int) -> t.Explanation:
        return self._ask("explain", t.Explanation, task)

    def logs(
        self,
        task: int,
        *,
        stream: str = "stdout",
        attempt: int | None = None,
        tail: int | None = None,
        follow: bool = False,
    ) -> Iterator[bytes]:
        """The output in pieces. Errors are raised before the first piece."""
        return self.open_logs(task, stream=stream, attempt=attempt, tail=tail, follow=follow).pieces

    def open_logs(
        self, task: int, *, stream: str, attempt: int | None, tail: int | None = None, follow: bool = False
    ) -> Logs:
        """The output as `logs` gives it, with the offset at which to continue after the daemon was restarted."""
        limit_s = None if follow else self._timeout_s
        reply = self._send(
            "logs", task, timeout_s=limit_s, stream=stream, attempt=attempt, tail=tail, follow=follow or None
        )
        offset = reply.headers.get(OFFSET_HEADER, "")
        return Logs(int(offset) if offset.isdecimal() else None if tail is not None else 0, reply.pieces())

    def cancel(self, task: int, *, signal: int = 15, reason: str = "") -> t.Done:
        return self._ask("cancel", t.Done, task, body=t.CancelRequest(signal=signal, reason=reason))

    def hold(self, task: int) -> t.Done:
        return self._ask("hold", t.Done, task)

    def release(self, task: int) -> t.Done:
        return self._ask("release", t.Done, task)

    def retry(self, task: int, *, fresh: bool = False) -> t.Done:
        return self._ask("retry", t.Done, task, body=t.RetryRequest(fresh=fresh))

    def preempt(self, task: int, *, hold: bool = False, reason: str = "") -> t.Done:
        return self._ask("preempt", t.Done, task, body=t.PreemptRequest(hold=hold, reason=reason))

    def pause(self, task: int, *, reason: str = "") -> t.Done:
        return self._ask("pause", t.Done, task, body=t.PauseRequest(reason=reason))

    def unpause(self, task: int) -> t.Done:
        return self._ask("unpause", t.Done, task)

    def update(self, task: int, request: t.UpdateRequest) -> t.TaskView:
        return self._ask("update", t.TaskView, task, body=request)

    def gpus(self) -> list[t.GpuView]:
        return self._ask("gpus", list[t.GpuView])

    def users(self) -> list[UserView]:
        """What users had, have and may have: your own account, or all accounts for an administrator."""
        return self._ask("users", list[UserView])

    def drain(self, gpu: str | None = None, *, reason: str = "") -> t.Done:
        return self._ask("drain", t.Done, body=t.DrainRequest(gpu=gpu, reason=reason))

    def resume(self, gpu: str | None = None) -> t.Done:
        return self._ask("resume", t.Done, body=t.DrainRequest(gpu=gpu))

    def settings(self) -> list[t.SettingView]:
        return self._ask("settings", list[t.SettingView])

    def shutdown(self, *, cancel_running: bool = False) -> t.Done:
        return self._ask("shutdown", t.Done, body=t.ShutdownRequest(cancel_running=cancel_running))

    def openapi(self) -> dict[str, Any]:
        return self._ask("openapi", dict[str, Any])

    def events(self) -> Iterator[t.StreamEvent]:
        """Events as they happen. Ends with the daemon, or when the reader lags too far behind."""
        pieces = self._send("events", timeout_s=None).pieces()
        decode = msgspec.json.Decoder(t.StreamEvent).decode
        return (decode(data) for data in _sse_data(pieces))

    def _ask(
        self, name: str, kind: type[T], task: int | None = None, body: t.Request | None = None, **query: object
    ) -> T:
        return _decode(self._send(name, task, body, timeout_s=self._timeout_s, **query), name, kind)

    def _send(
        self,
        name: str,
        task: int | None = None,
        body: t.Request | None = None,
        *,
        timeout_s: float | None,
        **query: object,
    ) -> Reply:
        route = BY_NAME[name]
        data = _encode(body)
        if name == "submit":
            self._link.require_trusted()  # it contains the submitter's environment
        reply = self._link.request(route.method, _target(route, task, query), data, timeout_s)
        if reply.status >= 400:
            raise _error(reply)
        return reply


def _decode(reply: Reply, name: str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(reply.read(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise errors.CarmaError(
            f"the daemon's answer to {name} cannot be read: {error}", "daemon and client may have different versions"
        ) from error


def _encode(body: t.Request | None) -> bytes | None:
    if body is None:
        return None
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError as error:
        bad = error.object[error.start : error.start + 1]
        raise errors.Usage(
            f"the command, its environment or a name contains bytes that are not UTF-8 (near {bad!a})",
            "unset that variable or rename that file; CARMA stores text",
        ) from error


def _error(reply: Reply) -> errors.CarmaError:
    raw = reply.read()
    try:
        problem = msgspec.json.decode(raw, type=t.Problem)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return errors.CarmaError(f"the daemon answered with HTTP status {reply.status} and no explanation")
    return errors.from_code(problem.code, problem.message, problem.hint)


def _sse_data(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The `data:` of each server-sent event, without comments (heartbeats)."""
    buffer = b""
    for piece in pieces:
        buffer += piece
        *blocks, buffer = buffer.split(b"\n\n")
        for block in blocks:
            data = [line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:")]
            if data:
                yield b"\n".join(data)
