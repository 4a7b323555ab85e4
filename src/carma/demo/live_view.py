"""Progress of the demo: panels on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from carma.core.model.units import show_s
from carma.demo.replay import Progress

if TYPE_CHECKING:
    from rich.console import RenderableType

LINE_EVERY_S = 5.0
REFRESH_S = 0.25
BAR = 16
MIN_PANEL_WIDTH = 60
Update = Callable[[tuple[Progress, ...]], None]


@contextlib.contextmanager
def live_view(*, silent: bool) -> Iterator[Update]:
    """Yields the function that draws the progress of the runs."""
    if silent:
        yield lambda _runs: None
        return
    if not sys.stdout.isatty():
        yield _line_printer()
        return
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield lambda runs: live.update(picture(runs, console.width), refresh=True)


def _line_printer() -> Update:
    began = next_at = time.monotonic()

    def update(runs: tuple[Progress, ...]) -> None:
        nonlocal next_at
        now = time.monotonic()
        if now >= next_at:
            next_at = now + LINE_EVERY_S
            print(f"{now - began:4.0f} s   " + "   |   ".join(line_of(run) for run in runs), flush=True)

    return update


def line_of(run: Progress) -> str:
    """`magm 03:12:44: 41/60 done, 6 running, 13 waiting, SM 62 %`."""
    state = f"{run.done}/{run.total} done"
    if run.finished:
        return f"{run.name}: {state} after {show_s(run.elapsed_s)}"
    active = [gpu.sm_active for gpu in run.gpus if gpu.sm_active is not None]
    activity = f", SM {100 * sum(active) / len(run.gpus):.0f} %" if active else ""
    return f"{run.name} {show_s(run.elapsed_s)}: {state}, {run.running} running, {run.waiting} waiting{activity}"


def picture(runs: tuple[Progress, ...], width: int) -> RenderableType:
    """One panel for each run: side by side in a wide terminal, otherwise one below the other."""
    from rich.console import Group
    from rich.table import Column, Table

    if width < MIN_PANEL_WIDTH * len(runs):
        return Group(*(_panel(run, width) for run in runs))
    grid = Table.grid(*(Column(ratio=1) for _ in runs), expand=True)
    grid.add_row(*(_panel(run, width // len(runs)) for run in runs))
    return grid


def _panel(run: Progress, width: int) -> RenderableType:
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    length = BAR if width >= 75 else BAR // 2
    lines = [_gpu_line(run, index, length, width - length - 30) for index in range(len(run.gpus))]
    counts = Text.assemble(
        ("tasks ", "bold"),
        (bar(run.done / run.total if run.total else 0.0, length), "green"),
        (f" {run.done}/{run.total} done  ", "bold"),
        f"{run.running} running  {run.waiting} waiting",
    )
    title = f"[bold]{run.name}[/]  {show_s(run.elapsed_s)}" + ("  [green]finished[/]" if run.finished else "")
    return Panel(Group(*lines, counts), title=title, title_align="left")


def _gpu_line(run: Progress, index: int, length: int, room: int) -> RenderableType:
    from rich.text import Text

    gpu = run.gpus[index]
    active = gpu.sm_active or 0.0
    used = "-" if gpu.used_mib is None else f"{gpu.used_mib / 1024:.0f}"
    return Text.assemble(
        (f"GPU {gpu.index} ", "bold"),
        (bar(active, length), "cyan" if active < 0.8 else "yellow"),
        f" {100 * active:3.0f} % SM ",
        (f"{used:>2}/{gpu.memory_mib / 1024:.0f} GiB ", "dim"),
        names_in([run.names.get(task, str(task)) for task in gpu.tasks], room),
        no_wrap=True,
        overflow="ellipsis",
    )


def names_in(names: list[str], room: int) -> str:
    """All names. If they do not fit, each is cut to an equal part of the room."""
    if len(", ".join(names)) <= room:
        return ", ".join(names)
    part = max(4, room // len(names) - 2)
    return ", ".join(name if len(name) <= part else name[: part - 1] + "…" for name in names)


def bar(share: float, width: int) -> str:
    full = round(min(1.0, max(0.0, share)) * width)
    return "█" * full + "░" * (width - full)
