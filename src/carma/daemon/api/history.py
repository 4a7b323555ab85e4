"""The routes about the past: pages of finished tasks, the story of one task, the report of a time span.

The archive is read in a thread, which also encodes the pages: a long history never blocks the event loop. What is
needed of the state is read on the loop beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import msgspec
from msgspec.structs import replace
from starlette.responses import Response

from carma.core.model.task import Task
from carma.core.model.values import LARGEST_ID, TaskId
from carma.core.ports import Archive, End, HistoryQuery, end_of
from carma.daemon.api.handlers import Handlers, wanted_outcomes, wanted_uid
from carma.daemon.http.request import ApiCall
from carma.daemon.views.report import DEFAULT_SPAN_S, Totals, full_hour, report
from carma.daemon.views.story import story
from carma.daemon.views.task_views import ViewContext, task_view
from carma.errors import Usage
from carma.wire import api_types as t
from carma.wire.report_types import Report
from carma.wire.routes import CURSOR_HEADER, HISTORY_LIMIT

DEFAULT_LIMIT = 100
MOST_REPORTED = 100_000  # tasks

_encode = msgspec.json.Encoder().encode


class HistoryRoutes(Handlers):
    async def history(self, call: ApiCall) -> Response:
        cursor: str | None = call.query.get("cursor")
        before = None if cursor is None else read_cursor(cursor)
        limit = call.query.get("limit", DEFAULT_LIMIT)
        wanted = HistoryQuery(wanted_uid(call), call.query.get("since"), wanted_outcomes(call), before, limit)
        in_memory = [task for task in self.shell.state.tasks.values() if wanted.has(task)]
        make = partial(_answer, self.shell.archive, wanted, in_memory, self._context(call.who))
        body, following = await self.shell.read(make)
        headers = {} if following is None else {CURSOR_HEADER: following}
        return Response(body, media_type="application/json", headers=headers)

    async def story(self, call: ApiCall) -> list[t.StoryLine]:
        task = await self.shell.look_up(call.task)
        gpus, whole = dict(self.shell.state.gpus), call.who.may_see(task)
        archive = self.shell.archive
        return await self.shell.read(lambda: story(archive.story(call.task), gpus, whole=whole))

    async def report(self, call: ApiCall) -> Report:
        shell, now = self.shell, self.shell.clock.now()
        since = full_hour(max(0.0, min(call.query.get("since", now - DEFAULT_SPAN_S), now)))
        totals = Totals(since, now)
        in_memory = list(shell.state.tasks.values())
        in_memory_ids = frozenset(task.id for task in in_memory)

        def read() -> int:
            count = 0
            for tasks in _archived(shell.archive, since):
                count += len(tasks)
                totals.add(task for task in tasks if task.id not in in_memory_ids)
            return count

        count = await shell.read(read, slow=True)
        usage = await shell.read(lambda: shell.archive.usage(since=since, until=now))
        totals.add(in_memory, shell.state)
        made = report(totals, usage, shell.state)
        if count < MOST_REPORTED:
            return made
        return replace(made, notes=(*made.notes, f"only the last {MOST_REPORTED:,} tasks are counted"))


def _archived(archive: Archive, since: float) -> Iterator[Sequence[Task]]:
    """Page by page: a month of tasks must not be in memory at once."""
    before: End | None = None
    count = 0
    while count < MOST_REPORTED:
        page = archive.page(HistoryQuery(since=since, before=before, limit=HISTORY_LIMIT))
        yield page.tasks
        if not page.more:
            return
        count += len(page.tasks)
        before = end_of(page.tasks[-1])


def _answer(
    archive: Archive, wanted: HistoryQuery, in_memory: Sequence[Task], context: ViewContext
) -> tuple[bytes, str | None]:
    """A page as JSON, and the cursor of the next page. Runs in the reader's thread."""
    archived, more = archive.page(wanted)
    by_id = {task.id: task for task in (*archived, *in_memory)}
    tasks = sorted(by_id.values(), key=end_of, reverse=True)
    if more:  # tasks that ended before the page's last one belong to the next page
        last = end_of(archived[-1])
        tasks = [task for task in tasks if end_of(task) >= last]
    more = more or len(tasks) > wanted.limit
    tasks = tasks[: wanted.limit]
    # One by one: a single call that encodes all of them would block the event loop.
    views = b",".join([_encode(task_view(task, context, None)) for task in tasks])
    return b"[" + views + b"]", write_cursor(tasks[-1]) if more else None


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
        raise Usage(
            f"cursor {text[:40]!r} does not come from a page of the history",
            f"send the value of the header {CURSOR_HEADER}",
        )
    return end[0], TaskId(end[1])
