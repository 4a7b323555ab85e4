"""`carma top`, driven by Textual's pilot against a daemon whose answers the test lays out."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace
from textual.events import Key
from textual.geometry import Region
from textual.pilot import Pilot
from textual.widgets import Static

from carma.cli import carma
from carma.cli.top.app import Top
from carma.cli.top.listing import Listing
from carma.cli.top.tables import chart
from carma.cli.top.task_screen import TaskScreen
from carma.errors import NotAllowed
from carma.wire import api_types as t
from tests.golden_text import assert_wording
from tests.unit.cli.scripted_daemon import FakeDaemon, finished, gpu_view, running, task_view
from tests.unit.cli.test_screens import SCORED, explanation

Drive = Callable[[Top, Pilot[None]], Awaitable[None]]
NARROW, WIDE = (80, 24), (140, 40)
LIMIT_PAUSES = 2_000
_CLOCK = re.compile(r"\d\d:\d\d:\d\d")
MEASURED = t.ProgressView(steps=1200, steps_per_s=12.34, alone_steps_per_s=15.0, slowdown=1.24)


def tasks() -> dict[int, t.TaskView]:
    found = [
        running(1, name="resnet", progress=MEASURED, energy_j=4_321.0, sm_active=0.41, used_mib=10_900, ran_s=99.0),
        running(2, name="bert", user="bob", gpu_indices=(0, 1), gpus=("GPU-0", "GPU-1"), observed_mib=None),
        task_view(3, name="large", reason_short="needs 12.4 GiB, GPU 2 has 9.1 GiB", needs_mib=12_700),
        task_view(4, name="sweep", array="4[17]", user="bob", reason_short="1 task before it", priority=5),
        task_view(5, name="later", code="H", held=True, reason_short="held"),
    ]
    return {view.id: view for view in found}


GPUS = [
    gpu_view(0, name="NVIDIA H200", foreign=(t.ForeignView(pid=7, name="python", memory_mib=300),)),
    gpu_view(1, name="NVIDIA H200", state="full", used_mib=20_000, booked_mib=12_700, sm_active=0.93),
    gpu_view(
        2, state="fault", tasks=(), used_mib=None, booked_mib=0, sm_active=None, sm_occupancy=None, dram_active=None
    ),
]
GPUS[2] = replace(GPUS[2], power_w=None)


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    with FakeDaemon() as fake:
        monkeypatch.setenv("CARMA_HOME", str(fake.home))
        fake.tasks = tasks()
        fake.answers |= {
            "gpus": GPUS,
            "explain": explanation(state="running", reason="placed on GPU 1", entries=SCORED),
        }
        yield fake


def drive(body: Drive, size: tuple[int, int] = NARROW) -> None:
    """`body` runs when the first answer is drawn."""

    async def main() -> None:
        app = Top("all", 0.05)
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: bool(app.gpus.rows))
            await pilot.pause()
            await body(app, pilot)

    asyncio.run(main())


async def until(pilot: Pilot[None], holds: Callable[[], bool]) -> None:
    for _ in range(LIMIT_PAUSES):
        if holds():
            return
        await pilot.pause(0.01)
    raise AssertionError(screen(pilot.app))


def screen(app: Any) -> str:
    """The text on the screen."""
    lines = [strip.text.rstrip() for strip in app.screen._compositor.render_strips()]
    return _CLOCK.sub("HH:MM:SS", "\n".join(lines))


def text(static: Static) -> str:
    return str(static.render())


def ids(listing: Listing[t.TaskView]) -> list[int]:
    return [task.id for task in listing.rows]


def test_the_screens_have_the_accepted_look(daemon: FakeDaemon) -> None:
    daemon.output = {"stdout": b"epoch 1\nepoch 2\n", "stderr": b"10%\r20%\r30%"}
    found: dict[str, str] = {}

    async def overview(app: Top, _pilot: Pilot[None]) -> None:
        found[f"overview {app.size.width}x{app.size.height}"] = screen(app)

    async def one_task(app: Top, pilot: Pilot[None]) -> None:
        await pilot.press("enter")
        await until(pilot, lambda: "30%" in screen(app) and "epoch 2" in screen(app) and "┤" in screen(app))
        await pilot.pause()
        found["task: log"] = re.sub(r"(memory, last|┤).*", r"\1", screen(app))
        await pilot.press("d")
        found["task: decision"] = screen(app).partition(" log (l)")[2]
        await pilot.press("a")
        found["task: attempts"] = screen(app).partition(" log (l)")[2]
        await pilot.press("c")
        found["confirmation"] = text(app.screen.query_one(Static))
        await pilot.press("n", "question_mark")
        found["help"] = text(app.screen.query_one(Static))

    drive(overview, NARROW)
    drive(overview, WIDE)
    drive(one_task, NARROW)
    assert_wording("top", found)


@pytest.mark.usefixtures("daemon")
def test_a_figure_that_is_not_measured_is_a_dash() -> None:
    async def body(app: Top, _pilot: Pilot[None]) -> None:
        lines = screen(app).splitlines()
        (gpu,) = [line for line in lines if " fault " in line]
        assert gpu.split()[2:7] == ["–/0.0/40.0", "–", "–", "–", "–"]
        (task,) = [line for line in lines if " bert " in line]
        assert task.split()[5:] == ["–", "–", "–/12.4", "–", "–"]

    drive(body)


@pytest.mark.usefixtures("daemon")
def test_the_cursor_stays_on_its_task_and_only_changed_lines_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    refresh = Listing.refresh

    def counted(self: Listing[Any], *regions: Region, **how: Any) -> Any:
        drawn.extend(region.y for region in regions)
        return refresh(self, *regions, **how)

    async def body(app: Top, pilot: Pilot[None]) -> None:
        await pilot.press("tab", "down")
        assert app.waiting.current is not None
        assert app.waiting.current.id == 4
        monkeypatch.setattr(Listing, "refresh", counted)
        app.waiting.show(app.waiting._records)
        assert drawn == []
        first, second, third = app.waiting.rows
        app.waiting.show([third, first, second])
        assert app.waiting.current.id == 4
        assert drawn == [1, 2, 3]
        app.waiting.show([first, third])  # it has started: the next one takes its place
        assert app.waiting.current.id == 5

    drive(body)


def test_columns_sort_both_ways_and_missing_figures_come_last(daemon: FakeDaemon) -> None:
    daemon.tasks[3] = running(3, name="alone", progress=replace(MEASURED, steps_per_s=3.0))

    async def body(app: Top, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: len(app.running.rows) == 3)
        while app.running.sort() != "STEP/S":
            pass
        assert ids(app.running) == [3, 1, 2]
        await pilot.press("r")
        assert ids(app.running) == [1, 3, 2]
        await pilot.pause()
        assert "STEP/▲" in screen(app)

    drive(body)


FOUND = {
    "bob": [2, 4],
    "large": [3],
    "held": [5],
    "running ada": [1],
    "gpu:1": [2],
    "17": [4],
    "no": [],
}


@pytest.mark.usefixtures("daemon")
def test_typing_filters_the_tasks() -> None:
    async def body(app: Top, pilot: Pilot[None]) -> None:
        for typed, found in FOUND.items():
            await pilot.press("slash")
            app._filter.value = typed
            await pilot.pause()
            assert [*ids(app.running), *ids(app.waiting)] == found
            await pilot.press("escape")
        assert [*ids(app.running), *ids(app.waiting)] == [1, 2, 3, 4, 5]

    drive(body)


@pytest.mark.usefixtures("daemon")
def test_letters_typed_at_once_after_the_slash_are_no_actions() -> None:
    async def body(app: Top, pilot: Pilot[None]) -> None:
        for key, letter in (("slash", "/"), ("c", "c"), ("r", "r"), ("slash", "/")):
            app.post_message(Key(key, letter))
        await until(pilot, lambda: app._filter.value == "cr/")
        assert len(app.screen_stack) == 1

    drive(body)


@pytest.mark.usefixtures("daemon")
def test_enter_on_a_gpu_shows_its_tasks() -> None:
    async def body(app: Top, pilot: Pilot[None]) -> None:
        await pilot.press("shift+tab", "down", "enter")
        await until(pilot, lambda: ids(app.running) == [2])
        assert ids(app.waiting) == []

    drive(body)


def test_an_action_is_done_after_confirmation_only(daemon: FakeDaemon) -> None:
    async def body(app: Top, pilot: Pilot[None]) -> None:
        await pilot.press("c", "n", "c", "escape", "h")  # a running task cannot be held: no dialog
        assert "no task to hold or release is selected" in await said(app, pilot)
        assert daemon.asked("cancel") == []
        await pilot.press("c", "y")
        assert "cancel 1" in await said(app, pilot, "cancel")
        assert daemon.asked("cancel") == [t.CancelRequest()]
        await pilot.press("tab", "end", "h")
        assert "Release task 5 later of ada" in screen(app)
        await pilot.press("y")
        assert "release 5" in await said(app, pilot, "release")
        assert len(daemon.asked("hold")) == 0

    drive(body)


async def said(app: Top, pilot: Pilot[None], word: str = "") -> str:
    """The status line, once it says that."""
    await until(pilot, lambda: "q quit" not in text(app._foot) and word in text(app._foot))
    return text(app._foot)


def test_a_refusal_of_the_daemon_is_shown_with_its_hint(daemon: FakeDaemon) -> None:
    daemon.refuses["cancel"] = NotAllowed("task 1 is of ada", "ask ada")

    async def body(app: Top, pilot: Pilot[None]) -> None:
        await pilot.press("c", "y")
        assert await said(app, pilot, "ask") == "task 1 is of ada; ask ada"

    drive(body)


def test_a_daemon_that_does_not_answer_is_told_and_asked_again(daemon: FakeDaemon) -> None:
    async def body(app: Top, pilot: Pilot[None]) -> None:
        daemon.refuses["gpus"] = NotAllowed("you may not")
        assert await said(app, pilot, "you") == "you may not; trying again"
        assert len(app.gpus.rows) == 3
        del daemon.refuses["gpus"]
        await until(pilot, lambda: "q quit" in text(app._foot))

    drive(body)


def test_an_open_task_is_followed_to_its_end(daemon: FakeDaemon) -> None:
    async def body(app: Top, pilot: Pilot[None]) -> None:
        await pilot.press("enter")
        await until(pilot, lambda: "task 1  resnet" in screen(app))
        daemon.tasks[1] = finished(1, code=3)
        await until(pilot, lambda: "failed with exit code 3" in screen(app))
        opened = app.screen
        assert isinstance(opened, TaskScreen)
        await pilot.press("escape")
        await until(pilot, lambda: not opened._poller.is_alive() and ids(app.running) == [2])

    drive(body)


def test_names_and_output_cannot_control_the_terminal(daemon: FakeDaemon) -> None:
    daemon.tasks[1] = running(1, name="\033]0;owned\a[b]bold")
    daemon.output = {"stdout": b"\033[2J[b]line\x9b31m\n", "stderr": b""}

    async def body(app: Top, pilot: Pilot[None]) -> None:
        shown = [screen(app)]
        await pilot.press("enter")
        await until(pilot, lambda: "[b]line" in screen(app))
        shown.append(screen(app))
        await pilot.press("c")
        shown.append(text(app.screen.query_one(Static)))
        for one in shown:
            assert "owned" in one
            assert all(letter.isprintable() for letter in one.replace("\n", ""))
        assert all("[b]bold" in one for one in shown[1:])

    drive(body)


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("key", ["q", "ctrl+c"])
def test_q_and_ctrl_c_end_it(key: str) -> None:
    async def body(app: Top, pilot: Pilot[None]) -> None:
        await pilot.press(key)
        await until(pilot, lambda: not app._running)
        assert app.return_code == 0

    drive(body)


def test_memory_over_time_has_a_gap_where_it_was_not_measured() -> None:
    assert chart([1.0, None, 2.0, 4.0], top=4.0, width=6, height=2) == ["     █", "  ▄ ██"]
    assert chart([1.0, 2.0, 4.0], top=4.0, width=2, height=1) == ["▄█"]


def test_without_a_terminal_it_names_what_to_use_instead() -> None:
    result = CliRunner().invoke(carma, ["top"])
    assert result.exit_code == 2
    assert "carma queue --watch" in result.stderr
