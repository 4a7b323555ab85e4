"""The table of routes. The server, the client, OpenAPI and the reference page are all made from it."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from carma.wire import types as t
from carma.wire.report import Report
from carma.wire.users import UserView

API = "/v1"
OFFSET_HEADER = "carma-offset"  # of an answer with output: at which byte of it the answer begins
Who = Literal["anyone", "owner", "admin"]


class Query(NamedTuple):
    name: str
    kind: type
    description: str


class Route(NamedTuple):
    name: str
    method: Literal["GET", "POST", "PATCH"]
    path: str
    who: Who
    summary: str
    request: type[t.Request] | None = None
    answer: Any = None  # a type, list[type], or None for a stream
    query: tuple[Query, ...] = ()
    status: int = 200


_LOG_QUERY = (
    Query("stream", str, "stdout (default) or stderr"),
    Query("attempt", int, "which attempt; the newest if not given"),
    Query("tail", int, "start so many lines before the end"),
    Query("follow", bool, "go on until the task has ended"),
)
_LIST_QUERY = (
    Query("user", str, "only this user's; 'all' for everybody's (default: your own)"),
    Query("state", str, "only this state"),
    Query("limit", int, "at most so many"),
)

ROUTES: tuple[Route, ...] = (
    Route("server", "GET", "/server", "anyone", "The daemon itself.", answer=t.ServerView),
    Route("submit", "POST", "/tasks", "anyone", "Submit a task or an array.", t.SubmitRequest, t.SubmitAnswer, (), 201),
    Route("tasks", "GET", "/tasks", "anyone", "Tasks that are not finished.", None, list[t.TaskView], _LIST_QUERY),
    Route(
        "task",
        "GET",
        "/tasks/{id}",
        "anyone",
        "One task; waits for a change first if asked to.",
        None,
        t.TaskView,
        (Query("wait_s", float, "answer when it has finished, or after so many seconds"),),
    ),
    Route("story", "GET", "/tasks/{id}/story", "anyone", "What happened to it.", None, list[t.StoryLine]),
    Route("explain", "GET", "/tasks/{id}/explain", "anyone", "Why it is where it is.", None, t.Explanation),
    Route("logs", "GET", "/tasks/{id}/logs", "owner", "Its output, as it was written.", None, None, _LOG_QUERY),
    Route("cancel", "POST", "/tasks/{id}/cancel", "owner", "Stop it, or take it out.", t.CancelRequest, t.Done),
    Route("hold", "POST", "/tasks/{id}/hold", "owner", "Keep it from starting.", None, t.Done),
    Route("release", "POST", "/tasks/{id}/release", "owner", "Let it start again.", None, t.Done),
    Route("retry", "POST", "/tasks/{id}/retry", "owner", "Queue a finished task again.", t.RetryRequest, t.Done),
    Route("preempt", "POST", "/tasks/{id}/preempt", "owner", "Ask it to save and come back.", t.PreemptRequest, t.Done),
    Route("update", "PATCH", "/tasks/{id}", "owner", "Change a waiting task.", t.UpdateRequest, t.TaskView),
    Route("gpus", "GET", "/gpus", "anyone", "The GPUs, what they do and who is on them.", None, list[t.GpuView]),
    Route("drain", "POST", "/gpus/drain", "admin", "No new tasks on a GPU or the server.", t.DrainRequest, t.Done),
    Route("resume", "POST", "/gpus/resume", "admin", "Take new tasks again.", t.DrainRequest, t.Done),
    Route(
        "users",
        "GET",
        "/users",
        "anyone",
        "What users had, have and may have; yours, or everybody's for an administrator.",
        None,
        list[UserView],
    ),
    Route(
        "history",
        "GET",
        "/history",
        "anyone",
        "Finished tasks, newest first.",
        None,
        list[t.TaskView],
        (*_LIST_QUERY, Query("since", float, "ended after this time")),
    ),
    Route(
        "report",
        "GET",
        "/report",
        "anyone",
        "What the server did over a span: tasks, GPU time and energy, by user and by GPU.",
        None,
        Report,
        (Query("since", float, "from this time on, rounded down to the hour (default: 24 hours ago)"),),
    ),
    Route("events", "GET", "/events", "anyone", "Server-sent events: what happens, as it happens.", None, None),
    Route("settings", "GET", "/settings", "anyone", "The daemon's settings and origins.", None, list[t.SettingView]),
    Route("shutdown", "POST", "/shutdown", "admin", "End the daemon; tasks go on.", t.ShutdownRequest, t.Done),
    Route("openapi", "GET", "/openapi.json", "anyone", "This table as OpenAPI 3.1.", None, dict[str, Any]),
)

BY_NAME = {route.name: route for route in ROUTES}


def path_of(name: str, **values: object) -> str:
    """The full path of a route with its values filled in."""
    return API + BY_NAME[name].path.format(**values)
