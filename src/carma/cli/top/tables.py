"""The columns of the three tables, and the words by which tasks are found. Functions of the daemon's answers only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from carma.cli.columns import FIELDS, asks_text, name_text, time_s
from carma.cli.gpus import name_of
from carma.cli.output import STATE_STYLES
from carma.cli.top.listing import MISSING, Field, Text
from carma.cli.wording import percent, rate_text, slowdown_text
from carma.core.model.units import show_s
from carma.wire.api_types import GpuView, TaskView

USED, BOOKED, FREE = "█", "▒", "·"
EIGHTHS = " ▁▂▃▄▅▆▇█"
BUSY, VERY_BUSY = 0.5, 0.8  # levels at which a figure changes its colour
SLOW, VERY_SLOW = 1.2, 1.5


def known(text: str) -> str:
    return MISSING if text in ("-", "") else text


def gib(mib: int | None) -> str:
    return MISSING if mib is None else f"{mib / 1024:.1f}"


def level_style(value: float | None, middle: float, high: float) -> str:
    return "" if value is None else "red" if value >= high else "yellow" if value >= middle else "green"


def memory_bar(used_mib: int | None, booked_mib: int, total_mib: int, width: int) -> Text:
    """Used, then booked and not used, then free. Memory in use above the bookings is red."""
    scale = width / max(1, total_mib)
    used = min(width, round((used_mib or 0) * scale) or int(bool(used_mib)))
    booked = min(width, round(booked_mib * scale))
    within = min(used, booked) if booked_mib else 0
    return (
        (USED * within, "green"),
        (USED * (used - within), "red"),
        (BOOKED * (booked - used), "yellow"),
        (FREE * (width - max(used, booked)), "dim"),
    )


def share_bar(share: float | None, width: int) -> Text:
    if share is None:
        return (("not measured"[:width].ljust(width), "dim"),)
    full = round(max(0.0, min(1.0, share)) * width)
    return ((USED * full, level_style(share, BUSY, VERY_BUSY)), (FREE * (width - full), "dim"))


def chart(values: Sequence[float | None], top: float, width: int, height: int) -> list[str]:
    """The newest values as columns of block characters, the newest at the right."""
    shown = [None] * max(0, width - len(values)) + list(values)[-width:]
    levels = [0 if value is None else max(1, round(value / (top or 1.0) * height * 8)) for value in shown]
    return ["".join(EIGHTHS[max(0, min(8, level - 8 * row))] for level in levels) for row in reversed(range(height))]


def _share(value: float | None) -> Text:
    return ((known(percent(value)), level_style(value, BUSY, VERY_BUSY)),)


def _share_field(title: str, name: str) -> Field[GpuView]:
    def value(gpu: GpuView) -> float | None:
        found: float | None = getattr(gpu, name)
        return found

    return Field(title, 4, lambda gpu, _: _share(value(gpu)), right=True, order=value)


def _holders(gpu: GpuView, _width: int) -> str:
    tasks = " ".join(str(task) for task in gpu.tasks) or MISSING
    return f"{tasks} +{len(gpu.foreign)} foreign" if gpu.foreign else tasks


GPU_FIELDS: tuple[Field[GpuView], ...] = (
    Field("GPU", 3, lambda gpu, _: str(gpu.index), right=True, order=lambda gpu: gpu.index),
    Field("MODEL", 14, lambda gpu, _: name_of(gpu), from_width=130),
    Field(
        "MEMORY",
        12,
        lambda gpu, width: memory_bar(gpu.used_mib, gpu.booked_mib, gpu.memory_mib, width),
        40,
        right=True,
        order=lambda gpu: gpu.booked_mib,
    ),
    Field(
        "GiB/BOOKED/TOTAL",
        17,
        lambda gpu, _: f"{gib(gpu.used_mib)}/{gib(gpu.booked_mib)}/{gib(gpu.memory_mib)}",
        right=True,
        order=lambda gpu: gpu.used_mib,
    ),
    Field("SM ACTIVITY", 12, lambda gpu, width: share_bar(gpu.sm_active, width), from_width=110),
    _share_field("SM%", "sm_active"),
    _share_field("OCC%", "sm_occupancy"),
    _share_field("DRM%", "dram_active"),
    Field(
        "W",
        4,
        lambda gpu, _: MISSING if gpu.power_w is None else f"{gpu.power_w:.0f}",
        right=True,
        order=lambda gpu: gpu.power_w,
    ),
    Field("STATE", 9, lambda gpu, _: ((gpu.state[:9], STATE_STYLES.get(gpu.state, "")),), order=lambda gpu: gpu.state),
    Field("TASKS", 9, _holders, 24, order=lambda gpu: len(gpu.tasks)),
)


def _slowdown(task: TaskView, _width: int) -> Text:
    slowdown = task.progress.slowdown
    return ((known(slowdown_text(task.progress)), level_style(slowdown, SLOW, VERY_SLOW)),)


def _wh(energy_j: float | None) -> str:
    if energy_j is None:
        return MISSING
    return f"{energy_j / 3600:.2f}" if energy_j < 36_000 else f"{energy_j / 3600:,.0f}"


def _name(task: TaskView, _width: int) -> str:
    return name_text(task)


def _id() -> Field[TaskView]:
    return Field("ID", 6, lambda task, _: str(task.id), right=True, order=lambda task: task.id)


def _user() -> Field[TaskView]:
    return Field("USER", 8, lambda task, _: task.user, order=lambda task: task.user)


def running_fields(now: Callable[[], float]) -> tuple[Field[TaskView], ...]:
    return (
        _id(),
        Field("NAME", 10, _name, 30, order=name_text),
        _user(),
        Field("GPU", 5, lambda task, _: FIELDS["gpus"].text(task, 0.0), order=lambda task: task.gpu_indices),
        Field(
            "TIME", 8, lambda task, _: show_s(time_s(task, now())), right=True, order=lambda task: time_s(task, now())
        ),
        Field(
            "STEP/S",
            6,
            lambda task, _: known(rate_text(task.progress.steps_per_s)),
            right=True,
            order=lambda task: task.progress.steps_per_s,
        ),
        Field("SLOW", 5, _slowdown, right=True, order=lambda task: task.progress.slowdown),
        Field(
            "GiB/BOOKED",
            11,
            lambda task, _: f"{gib(task.used_mib)}/{gib(task.booking_mib)}",
            right=True,
            order=lambda task: task.used_mib,
        ),
        Field("SM%", 3, lambda task, _: known(percent(task.sm_active)), right=True, order=lambda task: task.sm_active),
        Field("Wh", 6, lambda task, _: _wh(task.energy_j), right=True, order=lambda task: task.energy_j),
        Field("STATE", 20, lambda task, _: task.reason or task.state, 60, from_width=110),
    )


def waiting_fields(now: Callable[[], float]) -> tuple[Field[TaskView], ...]:
    return (
        _id(),
        Field("NAME", 10, _name, 30, order=name_text),
        _user(),
        Field(
            "WAITS", 8, lambda task, _: show_s(time_s(task, now())), right=True, order=lambda task: time_s(task, now())
        ),
        Field("GPUS", 8, lambda task, _: asks_text(task), right=True, order=lambda task: task.needs_mib),
        Field(
            "PRIO", 4, lambda task, _: str(task.priority), right=True, order=lambda task: task.priority, from_width=100
        ),
        Field("TRIES", 5, lambda task, _: str(len(task.attempts)), right=True, from_width=100),
        Field("WHY", 20, lambda task, _: task.reason_short or task.reason or task.state, 42),
    )


def is_found(task: TaskView, words: Sequence[str]) -> bool:
    """Whether each word is part of the id, name, user, state or code; `gpu:2`: whether it runs there."""
    gpus = " ".join(f"gpu:{index} " for index in task.gpu_indices)
    held = "held" if task.held else ""
    text = f"{task.id} {name_text(task)} {task.user} {task.state} {task.code} {held} {gpus}".lower()
    return all(word + " " in text if word.startswith("gpu:") else word in text for word in words)
