"""`carma bench collocation`: repeats the published collocation analysis on a GPU of this machine.

A small and a large training task, 1 to 8 copies of each on one GPU, with plain time slicing ("naive"), under MPS, and
one copy on each MIG instance if there are any. All copies are started once. A point runs the first copies; the others
keep their memory and a context, and are idle. Throughput is relative to one time-sliced copy alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from carma.core.model.values import Gpu
from carma.errors import Refused, Usage
from carma_lab.bench import results_file as written
from carma_lab.bench.gpu.collocated import BATCH, COLLOCATED
from carma_lab.bench.gpu.collocation_view import PUBLISHED, Point, draw, points_of, print_points, relative_to_one
from carma_lab.bench.gpu.environment import Study, StudyMachine, open_machine
from carma_lab.bench.gpu.meter import Reading
from carma_lab.bench.gpu.workers import Worker, WorkerDied

WARM_S = 1.0
SLACK = 1.03  # copies are a little larger or smaller than the first one
MECHANISMS = ("timeslice", "mps", "mig")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Empty `mechanism`: all that are here. `redraw`: table and plot of an earlier file; nothing is measured."""

    copies: int = 8
    task: tuple[str, ...] = ("small", "large")
    mechanism: tuple[str, ...] = ()
    seconds: float = 4.0
    gpu: str | None = None
    limit_s: float = 900.0  # no further point is begun after it
    json: str = "collocation.json"
    plot: str | None = None  # None: beside the figures
    redraw: str | None = None


def run(options: Options, machine: StudyMachine | None = None) -> int:
    """Measure, write and draw; every point is on disk as soon as it is measured."""
    figures = options.redraw or options.json
    plot = options.plot or str(Path(figures).with_suffix(".png"))
    if options.redraw is None:
        _check(options)
        written.check_place(plot)
        with machine or open_machine() as there:
            CollocationStudy(options, there).measure()
    return _show(figures, plot)


def _check(options: Options) -> None:
    written.check_place(options.json)
    unknown = [name for name in (*options.task, *options.mechanism) if name not in (*COLLOCATED, *MECHANISMS)]
    if unknown:
        raise Usage(f"There is no {unknown[0]!r}.", f"Tasks: {', '.join(COLLOCATED)}. Ways: {', '.join(MECHANISMS)}.")


def _show(json_file: str, plot_file: str) -> int:
    try:
        head, points = points_of(json_file)
    except (OSError, ValueError) as error:  # msgspec's are ValueErrors, and text that is not UTF-8 is one
        raise Refused(
            f"{json_file} is not a file of this study: {error}", "carma bench collocation writes one"
        ) from error
    written.check_place(plot_file)
    print_points(head, points)
    problem = draw(head, points, plot_file, json_file)
    written.say(problem or f"Figures in {json_file}, picture in {plot_file}.")
    return 0


class CollocationStudy(Study):
    """One run: the points so far."""

    def __init__(self, options: Options, machine: StudyMachine) -> None:
        super().__init__("collocation", options, machine, WARM_S)
        self.points: list[Point] = []
        self._footprints: dict[str, dict[str, int | None]] = {}

    def measure(self) -> None:
        mechanisms = self._mechanisms()
        self._write()
        try:
            for task in self._options.task:
                for mechanism in mechanisms:
                    self._series(task, mechanism)
        finally:
            self._write()

    def _mechanisms(self) -> list[str]:
        """The mechanisms that can be measured. A mechanism that was named in the options must be available."""
        missing: dict[str, str] = {}
        if self._gpu.kind == "mig":
            missing |= dict.fromkeys(("timeslice", "mps"), f"GPU {self._gpu.index} is a MIG instance, not a whole card")
        elif not self._machine.has_mps:
            missing["mps"] = "there is no nvidia-cuda-mps-control here"
        if not self._machine.instances():
            missing["mig"] = "no card here has MIG instances, and the layout of a card is not ours to change"
        for name in self._options.mechanism:
            if name in missing:
                raise Refused(f"{name} cannot be measured: {missing[name]}.")
        for name, why in () if self._options.mechanism else missing.items():
            self._tell(f"{name} is left out: {why}")
        return [name for name in self._options.mechanism or MECHANISMS if name not in missing]

    def _series(self, task: str, mechanism: str) -> None:
        """All numbers of copies of one task under one mechanism. A failure ends this series and not the study."""
        copies = 1
        try:
            self._in_time()
            with self._machine.share(mechanism) as environment, contextlib.ExitStack() as stack:
                ready = self._copies(task, mechanism, self._places(mechanism), environment, stack)
                written.say(f"{task}, {mechanism}: {len(ready)} copies ready after {self._elapsed_s:.0f} s")
                for copies in range(1, len(ready) + 1):
                    self._in_time()
                    self._point(task, mechanism, ready[:copies])
        except (WorkerDied, Refused) as error:
            self._tell(f"{task}, {mechanism}, from {copies} copies on: {error}")

    def _in_time(self) -> None:
        if self._elapsed_s > self._options.limit_s:
            raise Refused(f"the {self._options.limit_s:g} s were over")

    def _places(self, mechanism: str) -> list[Gpu]:
        if mechanism == "mig":
            return list(self._machine.instances())[: self._options.copies]
        return [self._gpu] * self._options.copies

    def _copies(
        self, task: str, mechanism: str, gpus: Sequence[Gpu], environment: dict[str, str], stack: contextlib.ExitStack
    ) -> list[Worker]:
        """The memory that the first copy takes says how many copies fit."""
        places = [(COLLOCATED[task].name, gpu) for gpu in gpus]
        before_mib = self._used_mib(gpus[0])
        ready = self._start(places[:1], environment, stack)
        after_mib = self._used_mib(gpus[0])
        known = before_mib is not None and after_mib is not None
        footprint_mib = max(1, (after_mib or 0) - (before_mib or 0)) if known and ready else None
        self._footprints.setdefault(task, {})[mechanism] = footprint_mib
        fit = len(gpus)
        if footprint_mib is not None and mechanism != "mig":
            fit = min(fit, 1 + int((gpus[0].memory_mib - (after_mib or 0)) / (footprint_mib * SLACK)))
            if fit < len(gpus):
                self._tell(f"{task}, {mechanism}: {fit} copies of {footprint_mib:,} MiB fit; more are left out")
        return ready + self._start(places[1:fit], environment, stack) if ready else []

    def _used_mib(self, gpu: Gpu) -> int | None:
        samples = self._machine.sampler.sample(time.time())
        return next((sample.memory_used_mib for sample in samples if sample.gpu == gpu.id), None)

    def _point(self, task: str, mechanism: str, copies: Sequence[Worker]) -> None:
        answers, reading = self._machine.together(copies, self._span)
        point = _point(task, mechanism, answers, reading, [worker.pid for worker in copies])
        self.points.append(point)
        self._write()
        written.say(
            f"{task}, {mechanism}, {point.copies} copies: {point.images_per_s:,.0f} images/s, "
            f"SM {written.shown(point.sm_active)} after {self._elapsed_s:.0f} s"
        )

    def _write(self) -> None:
        more = {
            "batch": BATCH,
            "tasks": {task: COLLOCATED[task].name for task in self._options.task},
            "footprint_mib": self._footprints,
            "published": PUBLISHED,
            "points": relative_to_one(self.points),
        }
        written.write(self._head() | more, self._options.json)


def _point(
    task: str, mechanism: str, answers: Sequence[dict[str, Any]], reading: Reading, pids: Sequence[int]
) -> Point:
    rates = [float(answer["rate"]) for answer in answers]
    images_per_s = sum(rates) * BATCH
    moving = [rate for rate in rates if rate > 0]
    shown = msgspec.structs.asdict(reading)
    by_pid = shown["memory_by_pid"]
    for name in ("memory_by_pid", "seconds", "memory_used_mib"):  # memory of all copies, also of those that stood still
        del shown[name]
    return Point(
        task=task,
        mechanism=mechanism,
        copies=len(rates),
        images_per_s=images_per_s,
        each_images_per_s=tuple(rate * BATCH for rate in rates),
        step_ms=1000 * sum(1 / rate for rate in moving) / len(moving) if moving else None,
        cpu=tuple(answer.get("cpu") for answer in answers),
        memory_mib=sum(by_pid[pid] for pid in pids) if all(pid in by_pid for pid in pids) else None,
        energy_per_image_j=_per_image_j(reading, images_per_s),
        **shown,
    )


def _per_image_j(reading: Reading, images_per_s: float) -> float | None:
    if reading.energy_j is None or not reading.seconds or not images_per_s:
        return None
    return reading.energy_j / (images_per_s * reading.seconds)
