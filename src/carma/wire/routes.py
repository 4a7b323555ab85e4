"""The table of routes. The server, the client, OpenAPI and the reference page are all made from it."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta

from carma.wire import api_types as t
from carma.wire.report_types import Report
from carma.wire.user_types import UserView

API = "/v1"
OFFSET_HEADER = "carma-offset"  # of an answer with output: at which byte of it the answer begins
CURSOR_HEADER = "carma-next"  # of a page of the history: the cursor of the next one; absent on the last page
LIST_LIMIT, HISTORY_LIMIT = 100_000, 1_000
Who = Literal["anyone", "owner", "admin"]

# Bounds keep every number within what SQLite and the clock can hold. A bound also refuses NaN.
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
    Query("follow", bool, "go on until the task has ended"),
)
_FILTERS = (
    Query("user", str, "only this user's; 'all' for everybody's (default: your own)"),
    Query("state", str, "only this state"),
)

ROUTES: tuple[Route, ...] = (
    Route("server", "GET", "/server", "anyone", "The daemon itself.", answer=t.ServerView),
    Route("submit", "POST", "/tasks", "anyone", "Submit a task or an array.", t.SubmitRequest, t.SubmitAnswer, (), 201),
    Route(
        "tasks",
        "GET",
        "/tasks",
        "anyone",
        "Tasks that are not finished.",
        None,
        list[t.TaskView],
        (*_FILTERS, Query("limit", Annotated[int, Meta(ge=1, le=LIST_LIMIT)], "maximum number (default 1000)")),
    ),
    Route(
        "task",
        "GET",
        "/tasks/{id}",
        "anyone",
        "One task; waits for a change first if asked to.",
        None,
        t.TaskView,
        (Query("wait_s", Seconds, "answer when it has finished, or after this many seconds (at most 60)"),),
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
        "Finished tasks, newest first, in pages.",
        None,
        list[t.TaskView],
        (
            *_FILTERS,
            Query("limit", Annotated[int, Meta(ge=1, le=HISTORY_LIMIT)], "maximum number on this page (default 100)"),
            Query("since", Time, "ended at this time or later"),
            Query("cursor", str, f"the page after the one whose answer had this value in the header {CURSOR_HEADER}"),
        ),
        header=Header(
            CURSOR_HEADER,
            "cursor of the next page; absent if there is none. A page can be shorter than its limit and have a next.",
        ),
    ),
    Route(
        "report",
        "GET",
        "/report",
        "anyone",
        "What the server did over a span: tasks, GPU time and energy, by user and by GPU.",
        None,
        Report,
        (Query("since", Time, "from this time on, rounded down to the hour (default: 24 hours ago)"),),
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
