"""What a user may do to a task, and the dialogs. An action is one row of ACTIONS."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from carma.cli.columns import name_text
from carma.cli.output import safe
from carma.cli.wording import WAITING
from carma.client import Client
from carma.wire.api_types import Done, TaskView


class Action(NamedTuple):
    key: str
    name: str
    consequence: str
    applies: Callable[[TaskView], bool]
    call: Callable[[Client, int], Done]


def _waits(task: TaskView) -> bool:
    return task.state in WAITING


def _runs(task: TaskView, *, paused: bool) -> bool:
    return task.state == "running" and (task.paused_at is not None) is paused


ACTIONS = (
    Action("c", "cancel", "It will be stopped and not retried.", lambda task: task.state != "finished", Client.cancel),
    Action("h", "hold", "It will not start until released.", lambda task: _waits(task) and not task.held, Client.hold),
    Action("h", "release", "It may start again.", lambda task: _waits(task) and task.held, Client.release),
    Action("p", "pause", "It stands still and keeps its memory.", lambda task: _runs(task, paused=False), Client.pause),
    Action("p", "unpause", "It continues.", lambda task: _runs(task, paused=True), Client.unpause),
)
_NAMES = {
    key: [action.name for action in ACTIONS if action.key == key] for key in dict.fromkeys(a.key for a in ACTIONS)
}
ACTION_KEYS = "  ".join(f"{key} {names[0]}" for key, names in _NAMES.items())
HELP = f"""\
[b]Tables[/b]
  Tab, Shift+Tab   next, previous table
  ↑ ↓ PgUp PgDn    move; Home, End: first, last
  Enter            open the task; on a GPU: show only its tasks
  s, r             sort by the next column; reverse the order
  /                filter by name, user, id, state or gpu:2; Esc ends it
  u                tasks of all users or only yours
  z                enlarge the table, or all tables again

[b]Task[/b]
{chr(10).join(f"  {key}                {' or '.join(names)}, after confirmation" for key, names in _NAMES.items())}
  l, d, a          of an open task: log, decision, attempts
  Esc              back

[b]Figures[/b]
  GiB              of a GPU: used / booked / total; of a task: used / booked
  SM% OCC% DRM%    SM activity, occupancy, DRAM activity: window means
  SLOW             time taken / time alone; ~: inferred from activity
  Wh               energy above idle power, of all attempts
  –                not measured

q quits CARMA top. Tasks continue."""


def action_for(key: str, task: TaskView) -> Action | None:
    return next((action for action in ACTIONS if action.key == key and action.applies(task)), None)


class Confirmation(ModalScreen[bool]):
    """Names the task and the consequence. Only `y` confirms."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "yes"),
        Binding("n,escape,q", "answer(False)", "no"),
    ]
    DEFAULT_CSS = """
    Confirmation { align: center middle; background: transparent; }
    Confirmation Static { width: 64; max-width: 90%; height: auto; padding: 0 1; }
    Confirmation Static { background: ansi_default; border: solid ansi_default; }
    """

    def __init__(self, action: Action, task: TaskView) -> None:
        super().__init__()
        self._action, self._subject = action, task

    def compose(self) -> ComposeResult:
        task = self._subject
        who = f"task {task.id} {name_text(task)} of {task.user}, which is {task.state}"
        question = f"{self._action.name.capitalize()} {safe(who)}?\n{self._action.consequence}"
        yield Static(f"{question}\n\ny: yes, {self._action.name}    n, Esc: no", markup=False)

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)


class Help(ModalScreen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,question_mark,enter", "dismiss", show=False)]
    DEFAULT_CSS = """
    Help { align: center middle; background: ansi_default; }
    Help VerticalScroll { width: 78; height: 100%; max-height: 30; padding: 0 1; scrollbar-size: 0 0; }
    """

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(HELP)
