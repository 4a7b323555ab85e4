"""The routes about the past: pages of finished tasks, what happened to one task, the report of a span.

The archive is read in a thread, and there a page is also turned into views and encoded: the event loop never waits for
a long history. What is needed of the state is taken on the loop beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
from msgspec.structs import replace
from starlette.responses import Response

from carma.core.model.status import Finished
from carma.core.model.task import Task
from carma.core.model.values import LARGEST_ID, TaskId
from carma.core.ports import Archive, End
from carma.daemon.auth import Identity
from carma.daemon.engine import Engine, look_up
from carma.daemon.http.request import Call
from carma.daemon.views.report import USUAL_S, Totals, full_hour, report
from carma.daemon.views.task_story import story
from carma.daemon.views.task_views import Lens, task_view
from carma.errors import Usage
from carma.wire import api_types as t
from carma.wire.report_types import Report
from carma.wire.routes import CURSOR_HEADER, HISTORY_LIMIT

DEFAULT_LIMIT = 100
REPORTED_MOST = 100_000

MakeLens = Callable[[Identity], Lens]
_encode = msgspec.json.Encoder().encode


class Wanted(NamedTuple):
    """Which finished tasks a page is about."""

    uid: int | None
    since: float | None
    kinds: Collection[str] | None  # tags of outcomes; None: all
    before: End | None
    limit: int

    def has(self, task: Task) -> bool:
        if not isinstance(task.status, Finished) or (self.uid is not None and task.owner.uid != self.uid):
            return False
        if self.since is not None and task.status.at < self.since:
            return False
        if self.kinds is not None and str(task.status.outcome.__struct_config__.tag) not in self.kinds:
            return False
        return self.before is None or end_of(task) < self.before


class History:
    def __init__(self, engine: Engine, make_lens: MakeLens) -> None:
        self._engine = engine
        self._lens = make_lens

    async def page(self, call: Call, uid: int | None, kinds: Collection[str] | None) -> Response:
        cursor: str | None = call.query.get("cursor")
        wanted = Wanted(
            uid=uid,
            since=call.query.get("since"),
            kinds=kinds,
            before=None if cursor is None else read_cursor(cursor),
            limit=call.query.get("limit", DEFAULT_LIMIT),
        )
        ended = [task for task in self._engine.state.tasks.values() if isinstance(task.status, Finished)]  # few of many
        in_memory = [task for task in ended if wanted.has(task)]
        make = partial(_answer, self._engine.archive, wanted, in_memory, self._lens(call.who))
        body, following = await self._engine.read(make)
        headers = {} if following is None else {CURSOR_HEADER: following}
        return Response(body, media_type="application/json", headers=headers)

    async def story(self, call: Call) -> list[t.StoryLine]:
        task = await look_up(self._engine, call.task)
        gpus, whole = dict(self._engine.state.gpus), call.who.may_see(task)
        archive = self._engine.archive
        return await self._engine.read(lambda: story(archive.story(call.task), gpus, whole=whole))

    async def report(self, call: Call) -> Report:
        engine, now = self._engine, self._engine.clock.now()
        since = full_hour(max(0.0, min(call.query.get("since", now - USUAL_S), now)))
        totals = Totals(since, now)
        in_memory = list(engine.state.tasks.values())
        here = frozenset(task.id for task in in_memory)

        def read() -> int:
            count = 0
            for tasks in _archived(engine.archive, since):
                count += len(tasks)
                totals.add(task for task in tasks if task.id not in here)
            return count

        count = await engine.read(read, slow=True)
        usage = await engine.read(lambda: engine.archive.usage(since=since, until=now))
        totals.add(in_memory, engine.state)
        made = report(totals, usage, engine.state)
        if count < REPORTED_MOST:
            return made
        return replace(made, notes=(*made.notes, f"tasks before the last {REPORTED_MOST:,} are not in it"))


def _archived(archive: Archive, since: float) -> Iterator[Sequence[Task]]:
    """Page by page, so that a month of tasks is never in memory at once."""
    before: End | None = None
    count = 0
    while count < REPORTED_MOST:
        page = archive.page(since=since, before=before, limit=HISTORY_LIMIT)
        yield page.tasks
        if not page.more:
            return
        count += len(page.tasks)
        before = end_of(page.tasks[-1])


def _answer(archive: Archive, wanted: Wanted, in_memory: Sequence[Task], lens: Lens) -> tuple[bytes, str | None]:
    """A page as JSON, and the cursor of the next one. Runs in the reader's thread."""
    uid, since, kinds, before, limit = wanted
    archived, more = archive.page(uid=uid, since=since, kinds=kinds, before=before, limit=limit)
    by_id = {task.id: task for task in (*archived, *in_memory)}
    tasks = sorted(by_id.values(), key=end_of, reverse=True)
    if more:  # of those that ended before its last task the archive has more
        last = end_of(archived[-1])
        tasks = [task for task in tasks if end_of(task) >= last]
    following = write_cursor(tasks[limit - 1]) if len(tasks) > limit else write_cursor(tasks[-1]) if more else None
    # One by one: a single call that encodes all of them would keep the interpreter from the event loop.
    views = b",".join([_encode(task_view(task, lens, None)) for task in tasks[:limit]])
    return b"[" + views + b"]", following


def end_of(task: Task) -> End:
    """The order of the history."""
    assert isinstance(task.status, Finished)
    return task.status.at, task.id


def write_cursor(task: Task) -> str:
    at, task_id = end_of(task)
    return f"{at!r}_{task_id}"


def read_cursor(text: str) -> End:
    at, _, task_id = text.partition("_")
    try:
        end = float(at), int(task_id)
    except ValueError:
        end = math.nan, 0
    if len(text) > 64 or not math.isfinite(end[0]) or not 0 < end[1] <= LARGEST_ID:
        raise Usage(f"cursor {text[:40]!r} is none that a page of the history gave", f"send the header {CURSOR_HEADER}")
    return end[0], TaskId(end[1])
