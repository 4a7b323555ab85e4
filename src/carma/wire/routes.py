"""The table of routes, from which the server, the client, OpenAPI and the reference page are built."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta

from carma.wire import api_types as t
from carma.wire.report_types import Report, UserView

API = "/v1"
OFFSET_HEADER = "carma-offset"  # of an answer with output: offset of its first byte
CURSOR_HEADER = "carma-next"  # of a page of the history: the cursor of the next one; absent on the last page
LIST_LIMIT, HISTORY_LIMIT = 100_000, 1_000
Who = Literal["anyone", "owner", "admin"]

# Bounds keep every number within the ranges of SQLite and the clock. A bound also refuses NaN.
Time = Annotated[float, Meta(ge=-1e12, le=1e12)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Lines = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class Query(NamedTuple):
    name: str
    kind: Any  # str, bool, or a number with its bounds
    description: str


class Header(NamedTuple):
    name: str
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
    header: Header | None = None  # of the answer


_LOG_QUERY = (
    Query("stream", str, "stdout (default) or stderr"),
    Query("attempt", Count, "number of the attempt (default: the newest)"),
    Query("tail", Lines, "start this many lines before the end"),
    Query("follow", bool, "continue until the task has ended"),
)
_FILTERS = (
    Query("user", str, "tasks of this user; 'all' for all users (default: your own)"),
    Query("state", str, "tasks in this state"),
)


def _limit(most: int, description: str) -> Query:
    return Query("limit", Annotated[int, Meta(ge=1, le=most)], description)


def _get(name: str, path: str, summary: str, answer: Any, *query: Query, header: Header | None = None) -> Route:
    return Route(name, "GET", path, "anyone", summary, None, answer, query, header=header)


_LIST_QUERY = (*_FILTERS, _limit(LIST_LIMIT, "maximum number (default 1000)"))
_WAIT = Query("wait_s", Seconds, "answer when it has finished, or after this many seconds (at most 60)")
_HISTORY_QUERY = (
    *_FILTERS,
    _limit(HISTORY_LIMIT, "maximum number on this page (default 100)"),
    Query("since", Time, "ended at this time or later"),
    Query("cursor", str, f"the page after the one whose answer had this value in the header {CURSOR_HEADER}"),
)
_CURSOR = Header(
    CURSOR_HEADER,
    "cursor of the next page; absent if there is none. A page can be shorter than its limit and have a next.",
)
_PERIOD = Query("since", Time, "start of the period, rounded down to the hour (default: 24 hours ago)")

ROUTES: tuple[Route, ...] = (
    _get("server", "/server", "The daemon itself.", t.ServerView),
    Route("submit", "POST", "/tasks", "anyone", "Submit a task or an array.", t.SubmitRequest, t.SubmitAnswer, (), 201),
    _get("tasks", "/tasks", "Tasks that are not finished.", list[t.TaskView], *_LIST_QUERY),
    _get("task", "/tasks/{id}", "One task, at once or after its end.", t.TaskView, _WAIT),
    _get("story", "/tasks/{id}/story", "The story of a task.", list[t.StoryLine]),
    _get("explain", "/tasks/{id}/explain", "Why a task waits, or why it got its GPUs.", t.Explanation),
    Route("logs", "GET", "/tasks/{id}/logs", "owner", "The output of a task.", None, None, _LOG_QUERY),
    Route("cancel", "POST", "/tasks/{id}/cancel", "owner", "Cancel a task.", t.CancelRequest, t.Done),
    Route("hold", "POST", "/tasks/{id}/hold", "owner", "Hold a waiting task.", None, t.Done),
    Route("release", "POST", "/tasks/{id}/release", "owner", "Release a held task.", None, t.Done),
    Route("retry", "POST", "/tasks/{id}/retry", "owner", "Queue a finished task again.", t.RetryRequest, t.Done),
    Route("preempt", "POST", "/tasks/{id}/preempt", "owner", "Preempt a running task.", t.PreemptRequest, t.Done),
    Route("pause", "POST", "/tasks/{id}/pause", "owner", "Pause a running task.", t.PauseRequest, t.Done),
    Route("unpause", "POST", "/tasks/{id}/unpause", "owner", "Let a paused task continue.", None, t.Done),
    Route("update", "PATCH", "/tasks/{id}", "owner", "Change a waiting task.", t.UpdateRequest, t.TaskView),
    _get("gpus", "/gpus", "The GPUs with their activity and tasks.", list[t.GpuView]),
    Route("drain", "POST", "/gpus/drain", "admin", "Drain a GPU or the server.", t.DrainRequest, t.Done),
    Route("resume", "POST", "/gpus/resume", "admin", "End a drain.", t.DrainRequest, t.Done),
    _get("users", "/users", "Use and limits: your own, or of all users for an administrator.", list[UserView]),
    _get("history", "/history", "Finished tasks, newest first.", list[t.TaskView], *_HISTORY_QUERY, header=_CURSOR),
    _get("report", "/report", "Tasks, GPU time and energy over a period, by user and by GPU.", Report, _PERIOD),
    _get("events", "/events", "Server-sent events: changes of tasks and GPUs.", None),
    _get("settings", "/settings", "The daemon's settings with their origins.", list[t.SettingView]),
    Route("shutdown", "POST", "/shutdown", "admin", "End the daemon; tasks go on.", t.ShutdownRequest, t.Done),
    _get("openapi", "/openapi.json", "This table as OpenAPI 3.1.", dict[str, Any]),
)

BY_NAME = {route.name: route for route in ROUTES}
