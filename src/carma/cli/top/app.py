"""The overview: GPUs, running tasks and waiting tasks, with the keys that act on them.

Every request runs in a thread; this module only draws what came. It uses the terminal's own colours, so that it suits
dark and light ones; NO_COLOR leaves bold, reverse and underlined text.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import Input, Static

from carma.cli.connection import ask
from carma.cli.output import safe
from carma.cli.top.actions import ACTION_KEYS, ACTIONS, Action, Confirmation, Help, action_for
from carma.cli.top.feed import REQUEST_S, Poller, Question, Snapshot
from carma.cli.top.listing import Listing
from carma.cli.top.tables import GPU_FIELDS, is_found, running_fields, waiting_fields
from carma.cli.top.task_screen import TASK_KEYS, TaskScreen
from carma.cli.wording import WAITING
from carma.core.model.units import show_count
from carma.errors import CarmaError
from carma.wire.api_types import GpuView, TaskView

KEYS = f"Enter open  / filter  s sort  {ACTION_KEYS}  z zoom  ? help  q quit"
NOTICE_S = 6.0
_OF_TABLES = ("filter", "end_filter", "sort", "reverse", "owner", "enlarge")
MOST_MEMORY = 600  # points of a task's memory over time


class Top(App[None]):
    """`owner`: whose tasks, as in `Client.tasks`."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: ansi_default; color: ansi_default; }
    Confirmation { background: transparent; }
    #head, #foot { height: 1; }
    #filter { display: none; height: 1; background: ansi_default; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit"),
        Binding("ctrl+c", "quit", priority=True),
        Binding("question_mark", "help"),
        Binding("slash", "filter", priority=True),
        Binding("escape", "end_filter"),
        Binding("s", "sort"),
        Binding("r", "reverse"),
        Binding("u", "owner"),
        Binding("z", "enlarge"),
        *(Binding(key, f"act('{key}')") for key in dict.fromkeys(action.key for action in ACTIONS)),
    ]

    class Arrived(Message):
        """An answer or an error of the daemon, or the note of an action."""

        def __init__(self, answer: Snapshot | CarmaError | str) -> None:
            super().__init__()
            self.answer = answer

    def __init__(self, owner: str | None, interval_s: float) -> None:
        super().__init__(ansi_color=True)
        self._interval_s = interval_s
        self._question = Question(owner)
        self._whose = owner
        self._poller = Poller(self._question, self._deliver, interval_s)
        self._snapshot: Snapshot | None = None
        self._error = ""
        self._notice, self._notice_until = "", 0.0
        self._enlarged = False
        self._head, self._foot = Static(id="head"), Static(KEYS, id="foot", markup=False)
        self._filter = Input(id="filter", compact=True, placeholder="name, user, id, state or gpu:2")
        self._memory: dict[int, list[int | None]] = {}
        self.gpus: Listing[GpuView] = Listing("GPUS", GPU_FIELDS, lambda gpu: gpu.gpu, "gpus")
        self.running: Listing[TaskView] = Listing("RUNNING", running_fields(self._now), _key, "running")
        self.waiting: Listing[TaskView] = Listing("WAITING", waiting_fields(self._now), _key, "waiting")

    def compose(self) -> ComposeResult:
        yield self._head
        yield from self._listings
        yield self._filter
        yield self._foot

    def on_mount(self) -> None:
        self.running.focus()
        self._poller.start()

    def on_unmount(self) -> None:
        self._poller.stop()
        self._question.stop()

    @property
    def _listings(self) -> tuple[Listing[Any], ...]:
        return (self.gpus, self.running, self.waiting)

    def _now(self) -> float:
        return self._snapshot.server.now if self._snapshot is not None else 0.0

    # What came.

    def _deliver(self, answer: Snapshot | CarmaError) -> None:
        self.post_message(self.Arrived(answer))

    def on_top_arrived(self, message: Arrived) -> None:
        answer = message.answer
        match answer:
            case Snapshot():
                self._error, self._snapshot = "", answer
                self._remember(answer)
                self._show()
            case CarmaError():
                self._error = f"{answer}; trying again"
            case str():
                self._notice, self._notice_until = answer, time.monotonic() + NOTICE_S
                self._poller.wake()
        self._show_foot()

    def _remember(self, snapshot: Snapshot) -> None:
        runs = {task.id: task.used_mib for task in snapshot.tasks if task.state == "running"}
        self._memory = {task: [*self._memory.get(task, ())[-MOST_MEMORY:], mib] for task, mib in runs.items()}

    def _show(self) -> None:
        if self._snapshot is None:
            return
        server, gpus, tasks = self._snapshot
        waiting = [task for task in tasks if task.state in WAITING]
        self.gpus.show(gpus)
        self.running.show([task for task in tasks if task.state not in WAITING])
        self.waiting.show(waiting)
        self._share_height()
        parts = [
            f"carma {server.version}",
            server.policy,
            show_count(server.gpus, "GPU"),
            f"{server.running:,} running",
            f"{server.queued:,} waiting",
            "all users" if self._whose == "all" else f"tasks of {self._whose or 'yours'}",
            *(["DRAINED"] if server.drained is not None else []),
            time.strftime("%H:%M:%S"),
        ]
        self._head.update(Text(safe("  ".join(parts)), "bold", no_wrap=True, overflow="ellipsis"))

    def _share_height(self) -> None:
        """Each table gets what it needs, as far as the others leave it a fair part; the last one gets the rest."""
        left = self.size.height - 2 - int(bool(self._filter.display))
        shown = [one for one in self._listings if not self._enlarged or one is self._focused_listing]
        heights: dict[Listing[Any], int] = {}
        for place, one in enumerate(sorted(shown, key=lambda one: len(one.rows))):
            heights[one] = min(left // (len(shown) - place), max(2, len(one.rows) + 1))
            left -= heights[one]
        heights[shown[-1]] += left
        for one in self._listings:
            one.display = one in shown
            if one in shown:
                one.styles.height = heights[one]

    def _show_foot(self) -> None:
        notice = self._notice if time.monotonic() < self._notice_until else ""
        opened = [(one.foot, one.error, TASK_KEYS) for one in self.screen_stack if isinstance(one, TaskScreen)]
        for foot, error, keys in ((self._foot, "", KEYS), *opened):
            text = self._error or notice or error
            foot.update(Text(safe(text or keys), "reverse" if text else "", no_wrap=True, overflow="ellipsis"))

    def on_resize(self) -> None:
        self._show()

    # Keys.

    @property
    def _focused_listing(self) -> Listing[Any]:
        return self.focused if isinstance(self.focused, Listing) else self.running

    def _say(self, text: str) -> None:
        self.post_message(self.Arrived(text))

    def action_help(self) -> None:
        self.push_screen(Help())

    def action_sort(self) -> None:
        self._say(f"sorted by {self._focused_listing.sort()}")

    def action_reverse(self) -> None:
        self._focused_listing.reverse()

    def action_owner(self) -> None:
        self._whose = None if self._whose == "all" else "all"
        self._question.ask_for(self._whose)
        self._poller.wake()

    def action_enlarge(self) -> None:
        self._enlarged = not self._enlarged
        self._show()

    def action_filter(self) -> None:
        """At once: what was typed after it must not be taken for the keys of actions."""
        self._filter.display = True
        self.screen.set_focus(self._filter)
        self._show()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:  # noqa: ARG002
        """Other screens have none of the keys for tables, and a slash is a letter where one types."""
        if action == "filter" and self.focused is self._filter:
            return False
        return action not in _OF_TABLES or len(self.screen_stack) == 1

    def action_end_filter(self) -> None:
        self._filter.value = ""
        self._filter.display = False
        self.running.focus()
        self._show()

    def on_input_changed(self, message: Input.Changed) -> None:
        words = message.value.lower().split()
        self.running.wanted = self.waiting.wanted = lambda task: is_found(task, words)
        self._show()

    def on_input_submitted(self) -> None:
        self.running.focus()

    def on_listing_opened(self, message: Listing.Opened) -> None:
        record = message.record
        if isinstance(record, TaskView):
            self.push_screen(TaskScreen(record, list(self._memory.get(record.id, ())), self._interval_s))
        else:
            self.action_filter()
            self._filter.value = f"gpu:{record.index}"
            self.running.focus()

    def _subject(self) -> TaskView | None:
        if isinstance(self.screen, TaskScreen):
            return self.screen.record
        current = self._focused_listing.current
        return current if isinstance(current, TaskView) else None

    def action_act(self, key: str) -> None:
        task = self._subject()
        action = None if task is None else action_for(key, task)
        if task is None or action is None:
            names = " or ".join(action.name for action in ACTIONS if action.key == key)
            return self._say(f"no task to {names} is selected")
        self.push_screen(Confirmation(action, task), self._confirmed(action, task))
        return None

    def _confirmed(self, action: Action, task: TaskView) -> Callable[[bool | None], None]:
        def act() -> None:
            try:
                note = ask(lambda client: action.call(client, task.id), REQUEST_S).note
            except CarmaError as error:
                note = f"{error}; {error.hint}" if error.hint else str(error)
            self._say(note or f"task {task.id}: done")

        def answered(yes: bool | None) -> None:
            if yes:
                self.run_worker(act, thread=True)

        return answered


def _key(task: TaskView) -> int:
    return task.id
