"""Sends the notices that the state holds, and reports each with NoticeSent.

1. A notice goes to the targets of the task's user in a process of that user, and to those of the administrator in a
   process of the daemon's own account (probes/notification.py).
2. One notice of a user is sent at a time, and AT_ONCE of all users: a receiver that hangs delays only its user.
3. Before the daemon ends, it waits a moment for what is being sent. The rest is sent by the next daemon.

A target that fails is reported in the story of the task, and not tried again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable

from carma.core.model.events import NoticeSent
from carma.core.model.settings import NotifyRules
from carma.core.model.task import Notice, Task
from carma.core.model.values import Owner, TaskId, TaskSpec
from carma.core.scheduling.explanation import waiting
from carma.core.state import State
from carma.daemon.probes.notification import Delivery, Message
from carma.daemon.shell import Shell
from carma.daemon.trusted_file import read_trusted
from carma.daemon.views.notice_text import NoticeText
from carma.errors import StoreError

log = logging.getLogger("carma.daemon")

AT_ONCE = 8
STORE_RETRY_S = 1.0
DRAIN_S = 5.0
_OWN = TaskSpec(command=("-",), directory="/")  # the administrator's command gets no environment of a task

Deliver = Callable[[Owner, TaskSpec, Message], Awaitable[Delivery]]  # does not raise


class Notices:
    """Must be used in one event loop."""

    def __init__(self, shell: Shell, rules: NotifyRules, deliver: Deliver) -> None:
        """Raises BadSettings if the file of targets cannot be read."""
        self._shell = shell
        self._rules = rules
        self._deliver = deliver
        self._host = socket.gethostname()
        self._sender = rules.sender or f"carma@{self._host}"
        self._server_targets = read_targets(rules.targets_file)
        self._own = Owner(os.geteuid(), os.getegid(), "carma")
        self._open: dict[tuple[TaskId, Notice], asyncio.Task[None]] = {}
        self._users: dict[int, asyncio.Lock] = {}
        self._places = asyncio.Semaphore(AT_ONCE)

    def send(self, task_id: TaskId) -> None:
        """Begin to send the notices of a task that are not being sent yet."""
        task = self._shell.state.tasks.get(task_id)
        for notice in task.notices if task is not None else ():
            if (task_id, notice) not in self._open and not self._shell.stopping.is_set():
                sending = asyncio.get_running_loop().create_task(self._send(task_id, notice))
                self._open[task_id, notice] = sending

    async def drain(self) -> None:
        """Called when the daemon ends, before its store closes."""
        if self._open:
            await asyncio.wait(self._open.values(), timeout=DRAIN_S)

    async def close(self) -> None:
        for sending in list(self._open.values()):
            sending.cancel()
        await asyncio.gather(*self._open.values(), return_exceptions=True)

    async def _send(self, task_id: TaskId, notice: Notice) -> None:
        try:
            task = self._shell.state.tasks[task_id]
            own = task.spec.notify
            found: list[Delivery] = []
            if own is not None and notice.kind in own.on:
                found.append(await self._in_turn(task.owner, task.spec, task, notice, own.targets))
            if self._server_targets and notice.kind in self._rules.on:
                found.append(await self._in_turn(self._own, _OWN, task, notice, self._server_targets))
            await self._report(task_id, notice, found)
        except _Stopping:
            pass  # the next daemon sends it
        finally:
            self._open.pop((task_id, notice), None)

    async def _in_turn(
        self, owner: Owner, spec: TaskSpec, task: Task, notice: Notice, targets: tuple[str, ...]
    ) -> Delivery:
        async with self._users.setdefault(owner.uid, asyncio.Lock()), self._places:
            if self._shell.stopping.is_set():
                raise _Stopping
            return await self._deliver(owner, spec, self._message(task, notice, targets, whole=spec is task.spec))

    def _message(self, task: Task, notice: Notice, targets: tuple[str, ...], *, whole: bool) -> Message:
        state = self._shell.state
        why = waiting(state, self._shell.clock.now(), [task.id]).get(task.id) if notice.kind == "wait" else None
        text = NoticeText(task, notice, self._host, whole=whole, reason=why.sentence if why is not None else "")
        return Message(
            targets=targets,
            subject=text.subject,
            text=text.text,
            facts=text.facts,
            smtp=self._rules.smtp,
            sender=self._sender,
        )

    async def _report(self, task_id: TaskId, notice: Notice, found: list[Delivery]) -> None:
        sent_to = tuple(dict.fromkeys(kind for one in found for kind in one.sent_to))
        problems = tuple(problem for one in found for problem in one.problems)
        if problems:
            log.warning("task %d: a notice (%s) was not sent to every target", task_id, notice.kind)

        def make(state: State) -> tuple[NoticeSent, ...]:
            task = state.tasks.get(task_id)
            if task is None or notice not in task.notices:
                return ()
            return (NoticeSent(self._shell.clock.now(), task_id, notice.kind, notice.at, sent_to, problems),)

        while True:
            try:
                return await self._shell.change(make)
            except StoreError:  # the writer has logged it
                await asyncio.sleep(STORE_RETRY_S)


class _Stopping(Exception):
    """The daemon ends before the notice was sent."""


def read_targets(file: str) -> tuple[str, ...]:
    """One target in each line; lines that begin with # are comments. Raises BadSettings."""
    if not file:
        return ()
    lines = [line.strip() for line in read_trusted("notify.targets_file", file).splitlines()]
    return tuple(line for line in lines if line and not line.startswith("#"))
