"""`carma top` on a real daemon: an open task with both streams, an action, a restart of the daemon."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

import pytest
from textual.pilot import Pilot
from textual.widgets import Static

from carma.cli.top import feed
from carma.cli.top.app import Top
from carma.cli.top.task_screen import TaskScreen
from tests.harness import Daemon, serving, virtual
from tests.unit.cli.test_top import screen, text, until

SAMPLED = {"monitor__period_s": 0.2, "window__min_samples": 1}
PRINTS = "import sys; print('to stdout', flush=True); print('to stderr', file=sys.stderr, flush=True); "


def _is_updated_alone(app: Top) -> Callable[[], bool]:
    """Whether the running task got new figures without a list of all tasks."""
    seen: tuple[float, float | None] = (0.0, None)

    def holds() -> bool:
        nonlocal seen
        found = (app._question._asked_at, app.running.rows[0].ran_s)
        if found[0] == seen[0]:
            return found[1] != seen[1]
        seen = found
        return False

    return holds


async def _use(app: Top, pilot: Pilot[None], daemon: Daemon, waits: int) -> None:
    await until(pilot, lambda: len(app.running.rows) == 1 and len(app.waiting.rows) == 1)
    await until(pilot, lambda: "2.0/3.9" in screen(app))  # GiB in use and booked
    await pilot.press("enter")
    opened = app.screen
    assert isinstance(opened, TaskScreen)
    await until(pilot, lambda: "to stdout" in screen(app) and "! to stderr" in screen(app))
    await until(pilot, lambda: "█" in text(opened.query_one("#memory", Static)))
    await pilot.press("escape")
    threads = [opened._poller, *opened._followers]
    assert len(threads) == 3
    await until(pilot, lambda: not any(thread.is_alive() for thread in threads))

    await pilot.press("tab", "h", "y")
    await until(pilot, lambda: app.waiting.current is not None and app.waiting.current.held)
    assert daemon.client.task(waits).held

    await until(pilot, _is_updated_alone(app))
    daemon.kill()
    await until(pilot, lambda: "trying again" in text(app._foot))
    daemon.spawn()
    await until(pilot, lambda: "trying again" not in text(app._foot))
    assert [task.id for task in app.waiting.rows] == [waits]


def test_top_follows_a_daemon_and_its_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(gpus=1, memory_mib=8192, **SAMPLED) as daemon:
        monkeypatch.setenv("CARMA_HOME", str(daemon.home))
        monkeypatch.setattr(feed, "FULL_S", 1e9)  # all tasks are listed after an event only
        program = PRINTS + f"import os; os.execv(sys.executable, {virtual(2048, 600)!r})"
        runs = daemon.submit(sys.executable, "-c", program, gpu_memory_mib=4000)
        daemon.until_state(runs, "running")
        waits = daemon.submit(*virtual(2048, 600), gpu_memory_mib=8000)

        async def main() -> None:
            app = Top("all", 0.1)
            async with app.run_test(size=(100, 30)) as pilot:
                await _use(app, pilot, daemon, waits)

        asyncio.run(main())
