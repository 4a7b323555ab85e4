"""The demo while it runs: a live picture on a terminal, a line every few seconds anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from carma.core.model.units import show_s
from carma.demo.replay import Progress

if TYPE_CHECKING:
    from rich.console import RenderableType

LINE_EVERY_S = 5.0
REFRESH_S = 0.25
BAR = 16


class View(Protocol):
    def __enter__(self) -> View: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None: ...

    def update(self, runs: tuple[Progress, ...], /) -> None: ...


class Silent:
    """For --json."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, kind: object, error: object, tb: object) -> None:
        return None

    def update(self, _runs: tuple[Progress, ...]) -> None:
        return None


class Lines:
    """Plain text, for a pipe, a log or a dumb terminal."""

    def __init__(self, write: Callable[[str], None] = print, every_s: float = LINE_EVERY_S) -> None:
        self._write = write
        self._every_s = every_s
        self._began = time.monotonic()
        self._next = 0.0

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, kind: object, error: object, tb: object) -> None:
        return None

    def update(self, runs: tuple[Progress, ...]) -> None:
        elapsed = time.monotonic() - self._began
        if elapsed < self._next:
            return
        self._next = elapsed + self._every_s
        self._write(f"{elapsed:4.0f} s   " + "   |   ".join(line_of(run) for run in runs))
        sys.stdout.flush()


class Live:
    """Panels side by side, drawn four times a second."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        self._console = Console()
        self._live = RichLive(console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> Live:
        self._live.start()
        return self

    def __exit__(self, kind: object, error: object, tb: object) -> None:
        self._live.stop()

    def update(self, runs: tuple[Progress, ...]) -> None:
        self._live.update(picture(runs, self._console.width), refresh=True)


def choose(*, json: bool) -> View:
    if json:
        return Silent()
    return Live() if sys.stdout.isatty() else Lines()


def line_of(run: Progress) -> str:
    """`magm 03:12:44: 41/60 done, 6 running, 13 waiting, SM 62 %`."""
    state = f"{run.done}/{run.total} done"
    if run.finished:
        return f"{run.name}: {state} after {show_s(run.elapsed_s)}"
    active = [gpu.sm_active for gpu in run.gpus if gpu.sm_active is not None]
    busy = f", SM {100 * sum(active) / len(run.gpus):.0f} %" if active else ""
    return f"{run.name} {show_s(run.elapsed_s)}: {state}, {run.running} running, {run.waiting} waiting{busy}"


def picture(runs: tuple[Progress, ...], width: int) -> RenderableType:
    """All runs: next to each other when there is room, else below one another."""
    from rich.console import Group
    from rich.table import Table

    across = len(runs) if width >= 60 * len(runs) else 1
    panels = [_panel(run, width // across) for run in runs]
    if across == 1:
        return Group(*panels)
    grid = Table.grid(expand=True)
    for _ in panels:
        grid.add_column(ratio=1)
    grid.add_row(*panels)
    return grid


def _panel(run: Progress, width: int) -> RenderableType:
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    long = BAR if width >= 75 else BAR // 2
    lines: list[RenderableType] = [_gpu_line(run, index, long, width - long - 30) for index in range(len(run.gpus))]
    counts = Text("tasks ", style="bold")
    counts.append(bar(run.done / run.total if run.total else 0.0, long), style="green")
    counts.append(f" {run.done}/{run.total} done  ", style="bold")
    counts.append(f"{run.running} running  {run.waiting} waiting")
    title = f"[bold]{run.name}[/]  {show_s(run.elapsed_s)}" + ("  [green]finished[/]" if run.finished else "")
    return Panel(Group(*lines, counts), title=title, title_align="left")


def _gpu_line(run: Progress, index: int, long: int, room: int) -> RenderableType:
    from rich.text import Text

    gpu = run.gpus[index]
    active = gpu.sm_active or 0.0
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"GPU {gpu.index} ", style="bold")
    text.append(bar(active, long), style="cyan" if active < 0.8 else "yellow")
    text.append(f" {100 * active:3.0f} % SM ")
    used = "-" if gpu.used_mib is None else f"{gpu.used_mib / 1024:.0f}"
    text.append(f"{used:>2}/{gpu.memory_mib / 1024:.0f} GiB ", style="dim")
    text.append(names_in([run.names.get(task, str(task)) for task in gpu.tasks], room))
    return text


def names_in(names: list[str], room: int) -> str:
    """All of them, each cut to its part of the room where they are too long together."""
    if len(", ".join(names)) <= room:
        return ", ".join(names)
    part = max(4, room // len(names) - 2)
    return ", ".join(name if len(name) <= part else name[: part - 1] + "…" for name in names)


def bar(share: float, width: int) -> str:
    full = round(min(1.0, max(0.0, share)) * width)
    return "█" * full + "░" * (width - full)
