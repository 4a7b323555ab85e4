"""The routes of the API that read, and the application made of all of them. What changes something is in verbs.py, what
reads the archive in history.py.

Handlers run on the daemon's loop: each is short, and a long list is made in pieces with room between for others.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import aclosing
from typing import Any, cast, get_args

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route as HttpRoute
from starlette.types import Send

import carma
from carma.config import describe
from carma.core.model.outcome import Outcome
from carma.core.model.status import Finished, Status, state_name
from carma.core.model.task import Task
from carma.core.model.values import TaskId
from carma.core.scheduling.feasibility import by_size
from carma.core.scheduling.queue_order import in_order
from carma.core.state import SERVER, State, turn
from carma.daemon.api.actions import FileCheck, Verbs, check_in_process
from carma.daemon.api.event_stream import sse
from carma.daemon.api.history_routes import History
from carma.daemon.api.log_reader import Output
from carma.daemon.auth import Door, Identity, uid_of
from carma.daemon.engine import Engine, find, look_up, look_up_own
from carma.daemon.http.request import MIB, Call, Handler, endpoint, problem
from carma.daemon.views.explanation import explanation
from carma.daemon.views.task_views import Lens, code_of, gpu_views, reasons_of, task_view, task_views
from carma.daemon.views.user_views import user_views
from carma.errors import CarmaError, NotFound, Usage
from carma.launch.attempt_files import AttemptFiles
from carma.wire import api_types as t
from carma.wire.openapi import document
from carma.wire.routes import API, OFFSET_HEADER, ROUTES
from carma.wire.user_types import UserView

_PIECE = 200  # views that are made without a pause
_LISTED = 1_000
_WAIT_MOST_S = 60.0  # a longer wait is several requests


def make_app(engine: Engine, door: Door | None = None, check_files: FileCheck = check_in_process) -> Starlette:
    """One application for the route table. It ends its streams when `app.state.closing` is set (HttpServer does).

    `check_files` checks the files of each submitted command.
    """
    door = door or Door(engine.settings.daemon.admins)
    closing = asyncio.Event()
    api = Api(engine, door, closing, check_files)
    max_bytes = engine.settings.daemon.max_request_mib * MIB
    routes = [
        HttpRoute(API + route.path, endpoint(route, api.handlers[route.name], door, max_bytes), methods=[route.method])
        for route in ROUTES
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _no_route})
    app.router.redirect_slashes = False
    app.state.closing = closing
    return app


async def _no_route(request: Request, error: Exception) -> Response:
    """An unknown path or method, as a Problem like every other error."""
    status = cast(HTTPException, error).status_code
    place = f"{request.method} {request.url.path[:100]}"
    hint = f"{API}/openapi.json lists the routes"
    wrong: CarmaError = Usage(f"{place}: not with this method", hint)
    answer = problem(NotFound(f"there is no route {place}", hint) if status == 404 else wrong)
    answer.status_code = status
    return answer


class _Stream(StreamingResponse):
    """Closes its iterator at once when the client goes away, so that files and subscriptions do not wait for that."""

    async def stream_response(self, send: Send) -> None:
        async with aclosing(cast(Any, self.body_iterator)):
            await super().stream_response(send)


class Api:
    def __init__(self, engine: Engine, door: Door, closing: asyncio.Event, check_files: FileCheck) -> None:
        self._engine = engine
        self._closing = closing
        self._door = door
        verbs = Verbs(engine, check_files)
        self._verbs = verbs
        self._history = History(engine, self._lens)
        self.handlers: dict[str, Handler] = {
            "server": self.server,
            "submit": verbs.submit,
            "tasks": self.tasks,
            "task": self.task,
            "story": self._history.story,
            "explain": self.explain,
            "logs": self.logs,
            "cancel": verbs.cancel,
            "hold": verbs.hold,
            "release": verbs.release,
            "retry": verbs.retry,
            "preempt": verbs.preempt,
            "update": self.update,
            "gpus": self.gpus,
            "users": self.users,
            "drain": verbs.drain,
            "resume": verbs.resume,
            "history": self.history,
            "report": self._history.report,
            "events": self.events,
            "settings": self.settings,
            "shutdown": self.shutdown,
            "openapi": self.openapi,
        }

    def _lens(self, who: Identity) -> Lens:
        state = self._engine.state
        engine = self._engine
        return Lens(state, engine.clock.now(), who, engine.paths.log_dir, by_size(state), engine.stage)

    async def server(self, call: Call) -> t.ServerView:
        engine, state = self._engine, self._engine.state
        finished = sum(isinstance(task.status, Finished) for task in state.tasks.values())
        return t.ServerView(
            version=carma.__version__,
            pid=os.getpid(),
            user=self._door.names.of(self._door.own_uid),
            uid=self._door.own_uid,
            home=str(engine.paths.state_dir),
            policy=state.policy.name,
            started_at=engine.started_at,
            now=engine.clock.now(),
            speed=engine.clock.speed,
            drained=state.drained.get(SERVER),
            gpus=len(state.gpus),
            queued=len(state.tasks) - finished - len(state.active),
            running=len(state.active),
            you_are_admin=call.who.admin,
            mechanism=state.rules.sharing.mechanism,
        )

    async def tasks(self, call: Call) -> list[t.TaskView]:
        wanted = self._wanted(call)
        live = [
            task for task in self._engine.state.tasks.values() if not isinstance(task.status, Finished) and wanted(task)
        ]
        active, places = self._engine.state.active, self._places()
        live.sort(key=lambda task: (task.id not in active, places.get(task.id, 0), turn(task)))
        return await self._views(live[: call.query.get("limit", _LISTED)], call.who)

    def _places(self) -> dict[TaskId, int]:
        """In the line, where users take turns or the policy has an order; else the tasks themselves tell."""
        state = self._engine.state
        if state.lanes is None and state.policy.urgent is None:
            return {}
        line = list(in_order(state, self._engine.clock.now()))
        return {task_id: place - len(line) for place, task_id in enumerate(line)}

    async def history(self, call: Call) -> Response:
        return await self._history.page(call, self._uid(call), _kinds(call))

    async def _views(self, tasks: list[Task], who: Identity) -> list[t.TaskView]:
        made: list[t.TaskView] = []
        lens = self._lens(who)
        reasons = reasons_of(tasks, lens)
        for start in range(0, len(tasks), _PIECE):
            made.extend(task_view(task, lens, reasons.get(task.id)) for task in tasks[start : start + _PIECE])
            await asyncio.sleep(0)
        return made

    def _uid(self, call: Call) -> int | None:
        """Whose tasks: the caller's, somebody's, or everybody's (None)."""
        name: str | None = call.query.get("user")
        if name is None:
            return call.who.uid
        if name == "all":
            return None
        uid = uid_of(name)
        if uid is None:
            raise NotFound(f"there is no user {name[:40]!r}", "'all' stands for everybody")
        return uid

    def _wanted(self, call: Call) -> Callable[[Task], bool]:
        uid, state = self._uid(call), _state(call)

        def wanted(task: Task) -> bool:
            return (uid is None or task.owner.uid == uid) and (state is None or state in _names(task.status))

        return wanted

    async def task(self, call: Call) -> t.TaskView:
        found = await look_up(self._engine, call.task)
        wait_s = call.query.get("wait_s")
        if wait_s is not None and wait_s > 0:
            await self._engine.wait_for(_over(call.task), min(wait_s, _WAIT_MOST_S))
            found = await look_up(self._engine, call.task)
        return self._view(self._engine.state.tasks.get(call.task, found), call.who)

    def _view(self, task: Task, who: Identity) -> t.TaskView:
        return task_views([task], self._lens(who))[0]

    async def explain(self, call: Call) -> t.Explanation:
        return explanation(await look_up(self._engine, call.task), self._lens(call.who))

    async def update(self, call: Call) -> t.TaskView:
        return self._view(await self._verbs.update(call), call.who)

    async def logs(self, call: Call) -> Response:
        task = await look_up_own(self._engine, call.task, call.who, "logs")
        attempt, stream = call.query.get("attempt"), call.query.get("stream", "stdout")
        if stream not in ("stdout", "stderr"):
            raise Usage(f"there is no stream {stream[:40]!r}", "stdout or stderr")
        if attempt is not None and all(attempt != one.number for one in task.attempts):
            raise NotFound(f"task {task.id} has no attempt {attempt}", f"it has {len(task.attempts)} so far")
        output = Output(
            self._engine,
            AttemptFiles(self._engine.paths.log_dir),
            lambda: find(self._engine, call.task),
            stream=stream,
            attempt=attempt,
            tail=call.query.get("tail"),
            follow=call.query.get("follow", False),
            closing=self._closing,
        )
        reader = await output.first()
        offset = {OFFSET_HEADER: str(reader.offset if reader is not None else 0)}
        return _stream(output.pieces(reader), "application/octet-stream", offset)

    async def gpus(self, _call: Call) -> list[t.GpuView]:
        return gpu_views(self._engine.state, self._engine.clock.now())

    async def users(self, call: Call) -> list[UserView]:
        return user_views(self._engine.state, call.who, self._engine.clock.now())

    async def events(self, _call: Call) -> Response:
        body = sse(self._engine.subscribe(), lambda: self._engine.state, self._closing)
        return _stream(body, "text/event-stream")

    async def settings(self, _call: Call) -> list[t.SettingView]:
        return [
            t.SettingView(name=line.name, value=line.value, origin=line.origin, description=line.description)
            for line in describe(self._engine.settings, self._engine.origins)
        ]

    async def shutdown(self, call: Call) -> t.Done:
        request: t.ShutdownRequest = call.body
        self._engine.request_stop(request.cancel_running)
        running = len(self._engine.state.active)
        count = "1 running task" if running == 1 else f"{running} running tasks"
        fate = "cancelled" if request.cancel_running else "left running, to be taken up at the next start"
        return t.Done(note="the daemon is stopping" + (f"; {count} {fate}" if running else ""))

    async def openapi(self, _call: Call) -> dict[str, Any]:
        return document()


def _over(task_id: TaskId) -> Callable[[State], bool]:
    def over(state: State) -> bool:
        task = state.tasks.get(task_id)
        return task is None or isinstance(task.status, Finished)

    return over


def _stream(body: AsyncIterator[bytes], kind: str, more: dict[str, str] | None = None) -> Response:
    return _Stream(body, media_type=kind, headers={"cache-control": "no-store", **(more or {})})


def _state(call: Call) -> str | None:
    """The state that is asked for, by its name or its short code."""
    state: str | None = call.query.get("state")
    if state is None:
        return None
    if state.lower() not in _STATES:
        raise Usage(f"there is no state {state[:40]!r}", "one of " + ", ".join(sorted(_STATES)))
    return state.lower()


def _kinds(call: Call) -> Collection[str] | None:
    """The outcomes that belong to the state that is asked for; None: all of them."""
    state = _state(call)
    if state is None or state == "finished":
        return None
    return {kind for kind in (state, _OUTCOME_CODES.get(state)) if kind in _OUTCOMES}


def _names(status: Status) -> tuple[str, str]:
    """The names of the state of a task that is not finished: its own, and the short code."""
    return state_name(status), code_of(status).lower()


_OUTCOME_CODES = {
    "cd": "succeeded",
    "f": "failed",
    "oom": "out_of_memory",
    "ca": "cancelled",
    "to": "timed_out",
    "lf": "launch_failed",
    "lo": "lost",
    "di": "disrupted",
    "nf": "never_fits",
}
_OUTCOMES = frozenset(str(kind.__struct_config__.tag) for kind in get_args(Outcome))
_STATES = (
    frozenset(str(kind.__struct_config__.tag) for kind in get_args(Status))
    | _OUTCOMES
    | {"pd", "h", "r", "cg", *_OUTCOME_CODES}
)
