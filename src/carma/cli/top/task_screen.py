"""One task: its facts, its memory since the view was opened, and its log, decision and attempts."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from rich.console import Group
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.message import Message
from textual.screen import Screen
from textual.widgets import ContentSwitcher, RichLog, Static

from carma.cli.columns import name_text, time_s
from carma.cli.explain import tables
from carma.cli.output import facts_table, safe
from carma.cli.show import attempt_facts, memory_text
from carma.cli.top.actions import ACTION_KEYS
from carma.cli.top.feed import LogFollower, Poller
from carma.cli.top.tables import chart
from carma.cli.wording import progress_text
from carma.client import Client
from carma.core.model.units import show_j, show_mib, show_s
from carma.errors import CarmaError
from carma.wire.api_types import Explanation, TaskView

if TYPE_CHECKING:
    from rich.console import RenderableType

CHART_ROWS = 3
MOST_LINES = 5_000
TASK_KEYS = f"Esc back  l log  d decision  a attempts  {ACTION_KEYS}  ? help"
TABS = {"log": "l", "decision": "d", "attempts": "a"}


class Details(NamedTuple):
    task: TaskView
    explanation: Explanation
    now: float


class TaskScreen(Screen[None]):
    """`memory`: what the overview has seen of the task's memory, in MiB; this screen continues it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "close", show=False),
        *(Binding(key, f"tab('{tab}')", show=False) for tab, key in TABS.items()),
    ]
    DEFAULT_CSS = """
    TaskScreen { background: ansi_default; }
    TaskScreen #facts, TaskScreen #memory, TaskScreen #tabs, TaskScreen .partial { height: auto; }
    TaskScreen .partial { max-height: 1; }
    TaskScreen ContentSwitcher { height: 1fr; }
    TaskScreen RichLog, TaskScreen VerticalScroll { background: ansi_default; scrollbar-size: 0 0; }
    """

    class Answered(Message):
        def __init__(self, answer: Details | CarmaError) -> None:
            super().__init__()
            self.answer = answer

    def __init__(self, task: TaskView, memory: list[int | None], interval_s: float) -> None:
        super().__init__()
        self.record = task
        self.foot = Static(TASK_KEYS, markup=False)
        self.error = ""
        self._memory = memory
        self._partial = {"stdout": b"", "stderr": b""}
        self._interval_s = interval_s
        self._poller = Poller(self._ask, lambda answer: self.post_message(self.Answered(answer)), interval_s)
        self._followers: list[LogFollower] = []

    def compose(self) -> ComposeResult:
        yield Static(id="facts")
        yield Static(id="memory", markup=False)
        yield Static(id="tabs")
        with ContentSwitcher(initial="log"):
            yield RichLog(id="log", max_lines=MOST_LINES, wrap=True, min_width=20)
            for tab in list(TABS)[1:]:
                with VerticalScroll(id=tab):
                    yield Static(id=f"{tab}-text")
        yield Static(id="stdout", classes="partial", markup=False)
        yield Static(id="stderr", classes="partial", markup=False)
        yield self.foot

    def on_mount(self) -> None:
        self.action_tab("log")
        self._poller.start()

    def on_unmount(self) -> None:
        self._poller.stop()
        for follower in self._followers:
            follower.stop()

    def action_close(self) -> None:
        self.dismiss()

    def action_tab(self, name: str) -> None:
        self.query_one(ContentSwitcher).current = name
        texts = [(f" {tab} ({key}) ", "reverse" if tab == name else "") for tab, key in TABS.items()]
        self.query_one("#tabs", Static).update(Text.assemble(*texts))
        self.query_one(f"#{name}").focus()

    def refresh_now(self) -> None:
        self._poller.wake()

    # The task.

    def _ask(self, client: Client) -> Details:
        task = self.record.id
        return Details(client.task(task), client.explain(task), client.server().now)

    def on_task_screen_answered(self, message: Answered) -> None:
        if isinstance(message.answer, CarmaError):
            self.error = str(message.answer)
            return
        self.error = ""
        task, explanation, now = message.answer
        self.record = task
        if task.state == "running":
            self._memory.append(task.used_mib)
        if task.attempts and not self._followers:
            self._follow(task)
        self.query_one("#facts", Static).update(Group(_title(task), facts_table(_facts(task, now))))
        self.query_one("#memory", Static).update(self._chart(task))
        self.query_one("#decision-text", Static).update(Group(*tables(explanation)))
        self.query_one("#attempts-text", Static).update(Group(*_attempts(task, now)))

    def _chart(self, task: TaskView) -> str:
        known = [mib for mib in self._memory if mib is not None]
        if not known:
            return "memory over time: not measured"
        top = max(*known, task.booking_mib or 0)
        width = max(10, self.size.width - 19)
        labels = [f"{show_mib(top):>9} " + ("booked" if top == task.booking_mib else "peak  "), " " * 16, f"{'0':>16}"]
        rows = chart(self._memory, top, width, CHART_ROWS)
        seen_s = show_s(len(self._memory[-width:]) * self._interval_s)
        return "\n".join(
            [f"memory, last {seen_s}", *(f"{label} ┤{row}" for label, row in zip(labels, rows, strict=True))]
        )

    # The log.

    def _follow(self, task: TaskView) -> None:
        newest = task.attempts[-1]
        streams = ("stdout",) if newest.stderr == newest.stdout and newest.stdout else ("stdout", "stderr")
        self._followers = [LogFollower(task.id, stream, self._deliver) for stream in streams]
        for follower in self._followers:
            follower.start()

    def _deliver(self, stream: str, item: bytes | CarmaError) -> None:
        """Waits until the screen has it, so that a task that prints much does not fill the memory."""
        with contextlib.suppress(RuntimeError, CancelledError):  # the application has ended
            self.app.call_from_thread(self._show_output, stream, item)

    def _show_output(self, stream: str, item: bytes | CarmaError) -> None:
        if not self.is_attached:
            return
        log = self.query_one(RichLog)
        if isinstance(item, CarmaError):
            log.write(Text(f"{stream}: {item}", "yellow"))
        else:
            *lines, rest = (self._partial[stream] + item).split(b"\n")
            self._partial[stream] = rest[-10_000:]
            for line in lines[-MOST_LINES:]:
                log.write(_log_text(stream, line), scroll_end=log.is_vertical_scroll_end)
            self.query_one(f"#{stream}", Static).update(_log_text(stream, rest) if rest else "")


def _log_text(stream: str, line: bytes) -> Text:
    """The last state of a line that was written again and again (a progress bar)."""
    shown = safe(line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace").expandtabs())
    return Text(shown) if stream == "stdout" else Text.assemble(("! ", "red"), shown)


def _title(task: TaskView) -> Text:
    held = ", held" if task.held else ""
    title = f"task {task.id}  {name_text(task)}  of {task.user}  {task.state} ({task.code}){held}"
    return Text(safe(title), "bold", overflow="ellipsis", no_wrap=True)


def _facts(task: TaskView, now: float) -> list[tuple[str, str]]:
    gpus = ", ".join(str(index) for index in task.gpu_indices)
    where = f"GPU {gpus} for {show_s(time_s(task, now))}; " if task.state == "running" and gpus else ""
    energy = "" if task.energy_j is None else f"; {show_j(task.energy_j)}"
    return [
        ("command", shlex.join(task.command)[:200]),
        ("runs" if where else "reason", where + (progress_text(task.progress, now) or "no steps counted") + energy)
        if where
        else ("reason", task.reason),
        ("memory", memory_text(task) + ("" if task.used_mib is None else f", {show_mib(task.used_mib)} now")),
    ]


def _attempts(task: TaskView, now: float) -> Iterable[RenderableType]:
    if not task.attempts:
        return [Text("no attempt yet")]
    return [facts_table(attempt_facts(attempt, now), indent=1) for attempt in reversed(task.attempts)]
