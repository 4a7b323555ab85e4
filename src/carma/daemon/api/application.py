"""The application: one handler for each route, a method with the route's name. Handlers that change something are in
actions.py, those that read the archive in history.py.

Handlers run on the daemon's event loop: each is short, and a long list is made in pieces with pauses for other work.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route as HttpRoute
from starlette.types import Send

import carma
from carma.config import describe
from carma.core.model.status import Finished, state_name
from carma.core.model.task import Task
from carma.core.model.units import show_count
from carma.core.model.values import TaskId
from carma.core.scheduling.queue_order import queued_ids
from carma.core.state import SERVER, State, queue_key
from carma.daemon.api.actions import Actions
from carma.daemon.api.handlers import CheckFiles, wanted_state, wanted_uid
from carma.daemon.api.history import HistoryRoutes
from carma.daemon.api.streams import LogStream, server_sent_events
from carma.daemon.auth import Authenticator, Identity
from carma.daemon.estimating import Estimates
from carma.daemon.http.request import MIB, ApiCall, endpoint, problem
from carma.daemon.shell import Shell
from carma.daemon.views.explanation import explanation
from carma.daemon.views.server_views import gpu_views, user_views
from carma.daemon.views.task_views import code_of, task_views
from carma.errors import CarmaError, NotFound, Usage
from carma.wire import api_types as t
from carma.wire.openapi import document
from carma.wire.report_types import UserView
from carma.wire.routes import API, OFFSET_HEADER, ROUTES

_PIECE = 200  # views that are made without a pause
_DEFAULT_LIMIT = 1_000
_LONGEST_WAIT_S = 60.0  # a client makes a longer wait out of several requests


def make_app(
    shell: Shell, estimates: Estimates, check_files: CheckFiles, authenticator: Authenticator | None = None
) -> Starlette:
    authenticator = authenticator or Authenticator(shell.settings.daemon.admins)
    api = Api(shell, estimates, check_files, authenticator)
    max_bytes = shell.settings.daemon.max_request_mib * MIB
    routes = [
        HttpRoute(
            API + route.path,
            endpoint(route, getattr(api, route.name), authenticator, max_bytes),
            methods=[route.method],
        )
        for route in ROUTES
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _no_route})
    app.router.redirect_slashes = False
    return app


async def _no_route(request: Request, error: Exception) -> Response:
    """An unknown path or method, as a Problem like every other error."""
    status = cast(HTTPException, error).status_code
    place = f"{request.method} {request.url.path[:100]}"
    hint = f"{API}/openapi.json lists the routes"
    wrong: CarmaError = Usage(f"{place}: this route has another method", hint)
    answer = problem(NotFound(f"there is no route {place}", hint) if status == 404 else wrong)
    answer.status_code = status
    return answer


class _Stream(StreamingResponse):
    """Closes its iterator as soon as the client disconnects, and with it files and subscriptions."""

    async def stream_response(self, send: Send) -> None:
        async with aclosing(cast(Any, self.body_iterator)):
            await super().stream_response(send)


class Api(Actions, HistoryRoutes):
    async def server(self, call: ApiCall) -> t.ServerView:
        shell, state = self.shell, self.shell.state
        finished = sum(isinstance(task.status, Finished) for task in state.tasks.values())
        own_uid = self.authenticator.own_uid
        return t.ServerView(
            version=carma.__version__,
            pid=os.getpid(),
            user=self.authenticator.names.of(own_uid),
            uid=own_uid,
            home=str(shell.paths.state_dir),
            policy=state.policy.name,
            started_at=shell.started_at,
            now=shell.clock.now(),
            speed=shell.clock.speed,
            drained=state.drained.get(SERVER),
            gpus=len(state.gpus),
            queued=len(state.tasks) - finished - len(state.active),
            running=len(state.active),
            you_are_admin=call.who.admin,
            mechanism=state.rules.sharing.mechanism,
        )

    async def tasks(self, call: ApiCall) -> list[t.TaskView]:
        state = self.shell.state
        uid, wanted = wanted_uid(call), wanted_state(call)
        live = [
            task
            for task in state.tasks.values()
            if not isinstance(task.status, Finished)
            and (uid is None or task.owner.uid == uid)
            and (wanted is None or wanted in (state_name(task.status), code_of(task.status).lower()))
        ]
        positions = self._queue_positions()
        live.sort(key=lambda task: (task.id not in state.active, positions.get(task.id, 0), queue_key(task)))
        return await self._views(live[: call.query.get("limit", _DEFAULT_LIMIT)], call.who)

    def _queue_positions(self) -> dict[TaskId, int]:
        """Positions in the queue if users take turns or the policy has its own order; otherwise `turn` gives the
        order."""
        state = self.shell.state
        if state.fair_queue is None and state.policy.urgent is None:
            return {}
        queue = list(queued_ids(state, self.shell.clock.now()))
        return {task_id: position - len(queue) for position, task_id in enumerate(queue)}

    async def _views(self, tasks: list[Task], who: Identity) -> list[t.TaskView]:
        made: list[t.TaskView] = []
        for view in task_views(tasks, self._context(who)):
            made.append(view)
            if len(made) % _PIECE == 0:
                await asyncio.sleep(0)
        return made

    async def task(self, call: ApiCall) -> t.TaskView:
        def finished(state: State) -> bool:
            task = state.tasks.get(call.task)
            return task is None or isinstance(task.status, Finished)

        found = await self.shell.look_up(call.task)
        wait_s = call.query.get("wait_s")
        if wait_s is not None and wait_s > 0:
            await self.shell.wait_for(finished, min(wait_s, _LONGEST_WAIT_S))
            found = await self.shell.look_up(call.task)
        return self._view(self.shell.state.tasks.get(call.task, found), call.who)

    async def explain(self, call: ApiCall) -> t.Explanation:
        return explanation(await self.shell.look_up(call.task), self._context(call.who))

    async def logs(self, call: ApiCall) -> Response:
        task = await self._own_task(call)
        attempt, stream = call.query.get("attempt"), call.query.get("stream", "stdout")
        if stream not in ("stdout", "stderr"):
            raise Usage(f"there is no stream {stream[:40]!r}", "stdout or stderr")
        if attempt is not None and all(attempt != one.number for one in task.attempts):
            raise NotFound(f"task {task.id} has no attempt {attempt}", f"it has {len(task.attempts)} so far")
        tail, follow = call.query.get("tail"), call.query.get("follow", False)
        output = LogStream(self.shell, call.task, stream=stream, attempt=attempt, tail=tail, follow=follow)
        file = await output.open_first()
        offset = {OFFSET_HEADER: str(file.offset if file is not None else 0)}
        return _stream(output.pieces(file), "application/octet-stream", offset)

    async def gpus(self, _call: ApiCall) -> list[t.GpuView]:
        return gpu_views(self.shell.state, self.shell.clock.now())

    async def users(self, call: ApiCall) -> list[UserView]:
        return user_views(self.shell.state, call.who, self.shell.clock.now())

    async def events(self, _call: ApiCall) -> Response:
        return _stream(server_sent_events(self.shell), "text/event-stream")

    async def settings(self, _call: ApiCall) -> list[t.SettingView]:
        return [t.SettingView(**line._asdict()) for line in describe(self.shell.settings, self.shell.origins)]

    async def shutdown(self, call: ApiCall) -> t.Done:
        request: t.ShutdownRequest = call.body
        self.shell.request_stop(request.cancel_running)
        running = len(self.shell.state.active)
        fate = "cancelled" if request.cancel_running else "left running; the next daemon adopts them"
        tasks = f"; {show_count(running, 'running task')} {fate}" if running else ""
        return t.Done(note=f"the daemon is stopping{tasks}")

    async def openapi(self, _call: ApiCall) -> dict[str, Any]:
        return document()


def _stream(body: AsyncIterator[bytes], kind: str, more: dict[str, str] | None = None) -> Response:
    return _Stream(body, media_type=kind, headers={"cache-control": "no-store", **(more or {})})
