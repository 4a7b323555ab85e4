"""The collocation study for people: a table, and a plot with the published figures beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from carma.errors import Refused
from carma_lab.bench.gpu.meter import Shown
from carma_lab.bench.results_file import print_table, say, shown
from carma_lab.reports.drawing import DPI, figure, styled

NAMES = {"timeslice": "naive (time slicing)", "mps": "MPS", "mig": "MIG"}
COLOURS = {"timeslice": "#8a8d91", "mps": "#1f6feb", "mig": "#d9822b"}
MARKS = {"timeslice": "o", "mps": "s", "mig": "^"}


class Point(Shown, frozen=True, kw_only=True):
    """A number of copies of one task that run at the same time. Activities are means over the span and all copies."""

    task: str  # small or large
    mechanism: str
    copies: int
    images_per_s: float  # of all copies together
    relative: float | None = None  # against one copy alone
    each_images_per_s: tuple[float, ...]
    step_ms: float | None  # the mean over the copies
    cpu: tuple[float | None, ...] = ()  # of a core, of each copy's process
    memory_mib: int | None = None  # of these copies, as the driver tells it for their processes
    energy_per_image_j: float | None = None


RANGES = {"small": (5.35, 5.35), "large": (1.15, 1.17)}
# The published throughput of the best collocation relative to one task alone.
PUBLISHED = {
    "gpu": "NVIDIA A100",
    "source": "published for an A100, and handed down; the abstract of arXiv 2209.06018 says up to four times",
    **RANGES,
    "order": "MPS > MIG > naive",
}


def points_of(path: str) -> tuple[dict[str, Any], list[Point]]:
    """Raises OSError, and ValueError for a file that is none of this study's."""
    head: dict[str, Any] = msgspec.json.decode(Path(path).read_bytes(), type=dict[str, Any])
    if "points" not in head:
        raise ValueError("it has no points")
    points = msgspec.convert(head.pop("points"), list[Point])
    if strange := [point.task for point in points if point.task not in ("small", "large")]:
        raise ValueError(f"it has points of a task {strange[0]!r}")
    msgspec.convert(head.get("tasks", {}), dict[str, str])
    return head, points


def relative_to_one(points: Sequence[Point]) -> list[Point]:
    """Against one copy time-sliced, alone on the whole GPU; where that was not measured, against the first point."""
    return [
        msgspec.structs.replace(point, relative=None if not base else point.images_per_s / base)
        for point in points
        for base in [_base(point, points)]
    ]


def _base(point: Point, points: Sequence[Point]) -> float | None:
    ones = [other for other in points if other.task == point.task and other.copies == 1]
    alone = [one for one in ones if one.mechanism == "timeslice"]
    own = [one for one in ones if one.mechanism == point.mechanism]
    return next((one.images_per_s for one in (*alone, *own)), None)


def print_points(head: dict[str, Any], points: Sequence[Point]) -> None:
    columns = ("copies", "images/s", "x one", "step ms", "SMACT", "SMOCC", "GRACT", "GPU-Util", "DRAM", "GiB", "W")
    for task, mechanism in dict.fromkeys((point.task, point.mechanism) for point in points):
        name = head.get("tasks", {}).get(task, task)
        chosen = [point for point in points if (point.task, point.mechanism) == (task, mechanism)]
        title = f"{name} on {head.get('gpu', 'a GPU')}, {NAMES.get(mechanism, mechanism)}"
        print_table(title, (*columns, "J/image"), [_cells(point) for point in chosen])
        say("")
    for task in dict.fromkeys(point.task for point in points):
        say(_beside_published(task, points))


def _cells(point: Point) -> list[str]:
    fractions = (point.sm_active, point.sm_occupancy, point.gr_active, point.gpu_util, point.dram_active)
    return [
        str(point.copies),
        f"{point.images_per_s:,.0f}",
        shown(point.relative),
        shown(point.step_ms, ".1f"),
        *(shown(fraction) for fraction in fractions),
        shown(None if point.memory_mib is None else point.memory_mib / 1024, ".1f"),
        shown(point.power_w, ".0f"),
        shown(point.energy_per_image_j, ".4f"),
    ]


def _beside_published(task: str, points: Sequence[Point]) -> str:
    """One sentence: the best of each mechanism here, and what was published."""
    best: dict[str, Point] = {}
    for point in points:
        if point.task == task and point.relative is not None:
            known = best.get(point.mechanism)
            best[point.mechanism] = point if known is None or point.relative > (known.relative or 0) else known
    ours = ", ".join(f"{NAMES.get(name, name)} {p.relative:.2f} x with {p.copies}" for name, p in best.items())
    return f"{task}: here at best {ours or 'nothing'}; published ({PUBLISHED['gpu']}): {_published(task)}"


def _published(task: str) -> str:
    low, high = RANGES[task]
    return f"{low:.2f} to {high:.2f} x" if low != high else f"up to {high:.2f} x ({PUBLISHED['order']})"


def draw(head: dict[str, Any], points: Sequence[Point], path: str, figures: str) -> str | None:
    """The plot; a sentence where it cannot be drawn. `figures` is the file that the points are in."""
    if not points:
        return f"No picture: no point was measured. {figures} says why."
    try:
        with styled("collocation"):
            _drawn(head, points).savefig(path, dpi=DPI)
    except Refused:
        return (
            f"Figures in {figures}. No picture: matplotlib is not installed. Get it and draw: "
            f"pip install matplotlib && carma bench collocation --redraw {figures}"
        )
    return None


def _drawn(head: dict[str, Any], points: Sequence[Point]) -> Any:
    tasks = list(dict.fromkeys(point.task for point in points))
    drawn = figure(11, 3.9 * len(tasks))
    for (left, right), task in zip(drawn.subplots(len(tasks), 2, squeeze=False), tasks, strict=True):
        own = [point for point in points if point.task == task]
        name = head.get("tasks", {}).get(task, task)
        _throughput(left, task, own, f"{task} task ({name})")
        _energy(right, own)
    drawn.suptitle(
        f"Copies of one training task on one GPU: {head.get('gpu')}, driver {head.get('driver')}, "
        f"torch {head.get('torch')}, {head.get('date')}"
    )
    return drawn


def _throughput(axes: Any, task: str, points: Sequence[Point], title: str) -> None:
    for mechanism in dict.fromkeys(point.mechanism for point in points):
        _line(axes, mechanism, [(p.copies, p.relative) for p in points if p.mechanism == mechanism])
    low, high = RANGES[task]
    most = max(point.copies for point in points)
    label = f"published (A100): {_published(task)}"
    if low == high:
        axes.axhline(high, color="#b42318", linestyle="--", linewidth=1.2, label=label)
    else:
        axes.axhspan(low, high, color="#b42318", alpha=0.25, linewidth=0, label=label)
    axes.axhline(1.0, color="#c9ccd1", linewidth=1.0, zorder=0)
    axes.set_title(title)
    axes.set_ylabel("throughput, against one copy alone")
    _finish(axes, most)


def _energy(axes: Any, points: Sequence[Point]) -> None:
    for mechanism in dict.fromkeys(point.mechanism for point in points):
        _line(axes, mechanism, [(p.copies, p.energy_per_image_j) for p in points if p.mechanism == mechanism])
    axes.set_title("energy of the whole card")
    axes.set_ylabel("J an image")
    _finish(axes, max(point.copies for point in points))


def _line(axes: Any, mechanism: str, points: Sequence[tuple[int, float | None]]) -> None:
    known = [(copies, value) for copies, value in points if value is not None]
    if known:
        copies, values = zip(*known, strict=True)
        style = {"color": COLOURS.get(mechanism), "marker": MARKS.get(mechanism, "o")}
        axes.plot(copies, values, linewidth=1.8, markersize=5, label=NAMES.get(mechanism, mechanism), **style)


def _finish(axes: Any, most: int) -> None:
    axes.set_xlabel("copies at the same time")
    axes.set_xticks(range(1, most + 1))
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
