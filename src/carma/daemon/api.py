"""The routes of the API that read, and the application made of all of them. What changes something is in verbs.py.

Handlers run on the daemon's loop: each is short, and a long list is made in pieces with room between for others.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, cast, get_args

from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route as HttpRoute
from starlette.types import Send

import carma
from carma.config import describe
from carma.core.admission import by_size
from carma.core.model import TaskId
from carma.core.outcome import Outcome
from carma.core.queue import in_order
from carma.core.state import SERVER, State, turn
from carma.core.status import Finished, Status, state_name
from carma.core.task import Task
from carma.daemon.auth import Door, Identity, uid_of
from carma.daemon.engine import Engine, find, require, require_own
from carma.daemon.explaining import explanation
from carma.daemon.logs import Output
from carma.daemon.reporting import USUAL_S, full_hour, report
from carma.daemon.request import MIB, Call, Handler, endpoint, problem
from carma.daemon.story import story
from carma.daemon.stream import sse
from carma.daemon.users import user_views
from carma.daemon.verbs import Verbs
from carma.daemon.views import Lens, code_of, gpu_views, reasons_of, task_view, task_views
from carma.errors import CarmaError, NotFound, Usage
from carma.wire import types as t
from carma.wire.openapi import document
from carma.wire.report import Report
from carma.wire.routes import API, OFFSET_HEADER, ROUTES
from carma.wire.users import UserView

_PIECE = 200  # views that are made without a pause
_LISTED, _LISTED_MOST = 1_000, 100_000
_REMEMBERED = 100
_WAIT_MOST_S = 60.0  # a longer wait is several requests


def make_app(engine: Engine, door: Door | None = None) -> Starlette:
    """One application for the route table. It ends its streams when `app.state.closing` is set (HttpServer does)."""
    door = door or Door(engine.settings.daemon.admins)
    closing = asyncio.Event()
    api = Api(engine, door, closing)
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
    def __init__(self, engine: Engine, door: Door, closing: asyncio.Event) -> None:
        self._engine = engine
        self._closing = closing
        self._door = door
        verbs = Verbs(engine, door.own_uid)
        self._verbs = verbs
        self.handlers: dict[str, Handler] = {
            "server": self.server,
            "submit": verbs.submit,
            "tasks": self.tasks,
            "task": self.task,
            "story": self.story,
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
            "report": self.report,
            "events": self.events,
            "settings": self.settings,
            "shutdown": self.shutdown,
            "openapi": self.openapi,
        }

    def _lens(self, who: Identity) -> Lens:
        state = self._engine.state
        engine = self._engine
        return Lens(state, engine.clock.now(), who, engine.log_paths, by_size(state), engine.stage)

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
        return await self._views(live[: _limit(call, _LISTED)], call.who)

    def _places(self) -> dict[TaskId, int]:
        """In the line, where users take turns or the policy has an order; else the tasks themselves tell."""
        state = self._engine.state
        if state.lanes is None and state.policy.urgent is None:
            return {}
        line = list(in_order(state, self._engine.clock.now()))
        return {task_id: place - len(line) for place, task_id in enumerate(line)}

    async def history(self, call: Call) -> list[t.TaskView]:
        wanted, limit = self._wanted(call), _limit(call, _REMEMBERED)
        state, since = self._engine.state, call.query.get("since")
        found = [
            task
            for task in state.tasks.values()
            if isinstance(task.status, Finished) and (since is None or task.status.at >= since) and wanted(task)
        ]
        # What is filtered here is looked for among many, since the archive itself knows users and times only.
        many = limit if "state" not in call.query else _LISTED_MOST
        archived = self._engine.archive.tasks(uid=self._uid(call), since=since, limit=many)
        found.extend(task for task in archived if task.id not in state.tasks and wanted(task))
        found.sort(key=_ended, reverse=True)
        return await self._views(found[:limit], call.who)

    async def report(self, call: Call) -> Report:
        now = self._engine.clock.now()
        since = full_hour(max(0.0, min(call.query.get("since", now - USUAL_S), now)))
        live = list(self._engine.state.tasks.values())
        # In a thread: a month of tasks takes seconds to read, and the loop must not wait for it.
        archived = await asyncio.to_thread(self._engine.archive.tasks, since=since, limit=_LISTED_MOST)
        usage = await asyncio.to_thread(self._engine.archive.usage, since=since, until=now)
        here = {task.id for task in live}
        made = report(
            [*live, *(task for task in archived if task.id not in here)], usage, self._engine.state, since, now
        )
        if len(archived) < _LISTED_MOST:
            return made
        return replace(made, notes=(*made.notes, f"tasks before the last {_LISTED_MOST:,} are not in it"))

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
        uid = self._uid(call)
        state: str | None = call.query.get("state")
        if state is not None and state.lower() not in _STATES:
            raise Usage(f"there is no state {state[:40]!r}", "one of " + ", ".join(sorted(_STATES)))

        def wanted(task: Task) -> bool:
            return (uid is None or task.owner.uid == uid) and (state is None or state.lower() in _names(task))

        return wanted

    async def task(self, call: Call) -> t.TaskView:
        require(self._engine, call.task)
        wait_s = call.query.get("wait_s")
        if wait_s is not None and wait_s > 0:
            await self._engine.wait_for(_over(call.task), min(wait_s, _WAIT_MOST_S))
        return self._view(require(self._engine, call.task), call.who)

    def _view(self, task: Task, who: Identity) -> t.TaskView:
        return task_views([task], self._lens(who))[0]

    async def story(self, call: Call) -> list[t.StoryLine]:
        task = require(self._engine, call.task)
        events = self._engine.archive.story(call.task)
        return story(events, self._engine.state.gpus, whole=call.who.may_see(task))

    async def explain(self, call: Call) -> t.Explanation:
        return explanation(require(self._engine, call.task), self._lens(call.who))

    async def update(self, call: Call) -> t.TaskView:
        return self._view(await self._verbs.update(call), call.who)

    async def logs(self, call: Call) -> Response:
        task = require_own(self._engine, call.task, call.who, "logs")
        attempt, stream = call.query.get("attempt"), call.query.get("stream", "stdout")
        if stream not in ("stdout", "stderr"):
            raise Usage(f"there is no stream {stream[:40]!r}", "stdout or stderr")
        if attempt is not None and all(attempt != one.number for one in task.attempts):
            raise NotFound(f"task {task.id} has no attempt {attempt}", f"it has {len(task.attempts)} so far")
        output = Output(
            self._engine,
            self._engine.paths.log_dir,
            lambda: find(self._engine, call.task),
            stream=stream,
            attempt=attempt,
            tail=call.query.get("tail"),
            follow=call.query.get("follow", False),
            closing=self._closing,
        )
        reader = output.first()
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


def _limit(call: Call, default: int) -> int:
    limit: int = call.query.get("limit", default)
    if not 0 < limit <= _LISTED_MOST:
        raise Usage(f"limit is {limit}; it must be between 1 and {_LISTED_MOST}")
    return limit


def _ended(task: Task) -> tuple[float, int]:
    return (task.status.at if isinstance(task.status, Finished) else 0.0, task.id)


def _names(task: Task) -> tuple[str, ...]:
    """By which names a task's state can be asked for: its own, or the short code."""
    status = task.status
    if isinstance(status, Finished):
        return ("finished", str(status.outcome.__struct_config__.tag), code_of(status).lower())
    return (state_name(status), code_of(status).lower())


_CODES = ("pd", "h", "r", "cg", "cd", "f", "oom", "ca", "to", "lo", "di", "nf")
_STATES = frozenset(str(kind.__struct_config__.tag) for kind in (*get_args(Status), *get_args(Outcome))) | {*_CODES}
