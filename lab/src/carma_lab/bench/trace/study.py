"""`carma bench trace`: what a policy gains on real GPUs, with whole training scripts.

1. Measures the time of a step of each script, once, which fixes the work for all runs.
2. Runs each task alone: the denominator of its slowdown.
3. Runs all tasks under each policy, with a fresh home or with one that has seen them, and without a manager.

A run is recorded when it is complete. Within the limit as many runs are made as fit; the same command with --resume
makes the others.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from carma.core.model.settings import PlacementRules
from carma.core.model.values import Record
from carma.errors import CarmaError, NoGpus, Refused, Usage
from carma.plugins import names
from carma.testing.private_daemon import ending_in_order
from carma_lab.bench.gpu.environment import check_torch
from carma_lab.bench.machine import WANTS_A_GPU, facts
from carma_lab.bench.results_file import command_of, print_table, say
from carma_lab.bench.trace import execution, summary
from carma_lab.bench.trace.execution import CutOff, Measured
from carma_lab.bench.trace.gpus import Gpus, RealGpus, VirtualGpus
from carma_lab.bench.trace.records import FILE, FRESH, KNOWN, NO_MANAGER, Plan, Results, TraceRun, joined, read, save
from carma_lab.bench.trace.tasks import TABLE, Task, parts_of, planned
from carma_lab.runs import record
from carma_lab.runs.record import Run

ALONE, DEFAULT = "alone", "default"
CASES = (ALONE, "exclusive", "magm", DEFAULT, f"{DEFAULT}:{KNOWN}", NO_MANAGER)
START_S = 15.0  # start of a daemon and of the first task
# Of the time alone: what a run is expected to take until one is on record. Generous: one that is cut off is lost.
EXPECTED = {"exclusive": 1.05, NO_MANAGER: 0.4}
SHARED = 0.6
IMPORTS = "import torch, transformers; torch.zeros(1, device='cuda')"


class Options(Record, frozen=True, kw_only=True):
    out: str = "."
    trace: str = "t1"
    tasks: int = len(TABLE)
    span_s: float = 60.0
    seconds: float = 48.0
    seed: int = 1
    only: tuple[str, ...] = CASES
    repeat: int = 1
    split: int = 1
    settings: dict[str, object] = {}
    limit_s: float = 900.0
    resume: bool = False
    virtual: bool = False
    redraw: bool = False


class Wanted(NamedTuple):
    """A run, or a part of it."""

    policy: str
    home: str
    repetition: int
    part: int
    parts: int

    def __str__(self) -> str:
        part = f", part {self.part} of {self.parts}" if self.parts > 1 else ""
        return f"{self.policy}, {self.home} home, run {self.repetition}{part}"


class Study:
    """The runs of one call. What is already in the file is not run again."""

    def __init__(self, options: Options, gpus: Gpus, results: Results) -> None:
        self.options, self.gpus, self.results = options, gpus, results
        self.out = Path(options.out)
        self.until = time.monotonic() + options.limit_s
        self.pairs = {name: str(value) for name, value in options.settings.items()}
        self.left: list[str] = []

    @property
    def left_s(self) -> float:
        return self.until - time.monotonic()

    @property
    def _label(self) -> str:
        """Of the settings, in names of files."""
        return "".join(f"+{name}={value}" for name, value in sorted(self.pairs.items()))

    def run(self) -> int:
        """1 if runs are missing."""
        self._steps()
        if not self.left:
            self._alone()
            for wanted in self._wanted():
                self._case(wanted)
        show(self.results)
        for line in self.left:
            say(f"missing: {line}")
        return 1 if self.left else 0

    def _save(self) -> None:
        save(self.results, self.out, summary.rows_of(self.results))

    def _fits(self, what: str, expected_s: float) -> bool:
        if expected_s <= self.left_s:
            say(f"[{self.left_s:.0f} s left] {what} (about {expected_s:.0f} s)")
            return True
        self.left.append(f"{what}: about {expected_s:.0f} s, and {max(0.0, self.left_s):.0f} s were left")
        return False

    def _steps(self) -> None:
        for place, task in enumerate(self.results.plan.tasks):
            if task.steps is None and self._fits(f"steps of {task.name}", self.options.seconds / 2):
                try:
                    steps = execution.calibrate(task.name, self.options.seconds, self.gpus, self.until)
                except CutOff as error:
                    self.left.append(f"steps of {task.name}: {error}")
                    continue
                tasks = list(self.results.plan.tasks)
                tasks[place] = replace(task, steps=steps)
                self.results.plan = replace(self.results.plan, tasks=tuple(tasks))
                self._save()

    def _alone(self) -> None:
        known = {one.name for one in self.results.alone}
        missing = [task for task in self.results.plan.tasks if task.name not in known]
        for task in missing if ALONE in self.options.only else ():
            if task.steps is not None and self._fits(f"{task.name} alone", self.options.seconds):
                try:
                    found = execution.alone(task.name, task.steps, self.gpus, self.until)
                except CutOff as error:
                    self.left.append(f"{task.name} alone: {error}")
                    continue
                self.results.alone.append(found)
                self._save()

    def _wanted(self) -> Iterator[Wanted]:
        for repetition in range(1, self.options.repeat + 1):
            for word in self.options.only:
                if word == ALONE:
                    continue
                policy, _, home = word.partition(":")
                policy = PlacementRules().policy if policy == DEFAULT else policy
                parts = self.options.split if policy == "exclusive" else 1
                for part in range(1, parts + 1):
                    yield Wanted(policy, home or FRESH, repetition, part, parts)

    def _pairs(self, wanted: Wanted) -> dict[str, str]:
        return {} if wanted.policy == NO_MANAGER else self.pairs

    def _case(self, wanted: Wanted) -> None:
        pairs = self._pairs(wanted)
        tasks = parts_of(self.results.plan.tasks, wanted.parts)[wanted.part - 1]
        if self.results.has(wanted.policy, wanted.home, pairs, *wanted[2:]):
            return
        before_s = self._before_s(wanted)
        if before_s is None:
            self.left.append(f"{wanted}: an earlier part is missing")
        elif self._fits(str(wanted), self._expected_s(wanted, tasks)):
            try:
                measured = self._measured(wanted, _less(tasks, before_s))
            except (CutOff, Refused) as error:
                self.left.append(f"{wanted}: {error}")
                return
            self._add(wanted, tasks, measured)

    def _before_s(self, wanted: Wanted) -> float | None:
        """Time of the earlier parts of the same run; None if one is missing."""
        earlier = [
            run.makespan_s
            for run in self.results.runs
            if (run.policy, run.home, run.repetition, run.parts) == (*wanted[:3], wanted.parts)
            and run.settings == self._pairs(wanted)
            and run.part < wanted.part
        ]
        return sum(earlier) if len(earlier) == wanted.part - 1 else None

    def _expected_s(self, wanted: Wanted, tasks: Sequence[Task]) -> float:
        seen = [run.makespan_s for run in self.results.runs if run.policy == wanted.policy and run.parts == 1]
        if seen and wanted.parts == 1:
            return START_S + 1.1 * max(seen)
        alone_s = self.results.alone_s()
        total_s = sum(alone_s.get(task.name, self.options.seconds) for task in tasks)
        return START_S + total_s * EXPECTED.get(wanted.policy, SHARED)

    def _measured(self, wanted: Wanted, tasks: Sequence[Task]) -> Measured:
        if wanted.policy == NO_MANAGER:
            return execution.unmanaged(tasks, self.gpus, self.until)
        home = self._home_of(wanted)
        if wanted.home == KNOWN and not home.exists():
            raise Refused(f"{home.name} does not exist", f"Run {wanted.policy} with a fresh home first.")
        with execution.daemon_of(
            wanted.policy, self.pairs, self.gpus, home if wanted.home == KNOWN else None
        ) as daemon:
            measured = execution.managed(daemon, tasks, self.gpus, self.until)
            if wanted.home == FRESH and wanted.parts == 1 and not home.exists():
                daemon.save_home(home)
        return measured

    def _home_of(self, wanted: Wanted) -> Path:
        return self.out / f"home-{wanted.policy}{self._label}.tar.gz"

    def _add(self, wanted: Wanted, tasks: Sequence[Task], measured: Measured) -> None:
        arrivals = [replace(row, arrival_s=task.arrival_s) for row, task in zip(measured.tasks, tasks, strict=True)]
        self.results.runs.append(
            TraceRun(
                **wanted._asdict(),
                settings=self._pairs(wanted),
                makespan_s=measured.makespan_s,
                shown=measured.shown,
                tasks=tuple(arrivals),
                place=self.gpus.place(),
            )
        )
        self._save()
        if measured.recorded is not None:
            self._keep(wanted, measured.recorded, [task.arrival_s for task in tasks])
        failed = sum(row.outcome != "succeeded" for row in measured.tasks)
        say(f"  makespan {measured.makespan_s:.0f} s, {failed} of {len(tasks)} tasks failed")

    def _keep(self, wanted: Wanted, found: Run, arrivals: Sequence[float]) -> None:
        """As `carma simulate --fidelity` reads it: parts are joined."""
        path = self.out / f"run-{wanted.policy}{self._label}-{wanted.home}-{wanted.repetition}.json"
        before_s = self._before_s(wanted)
        if wanted.part > 1 and before_s is not None and path.exists():
            found = joined(record.read(path), found, before_s, arrivals)
        record.write(replace(found, course=()), path)


def _less(tasks: Sequence[Task], before_s: float) -> list[Task]:
    """Arrivals, counted from the end of the earlier parts."""
    return [replace(task, arrival_s=max(0.0, task.arrival_s - before_s)) for task in tasks]


def run(options: Options) -> int:
    if options.redraw:
        show(read(Path(options.out)))
        return 0
    _check(options)
    gpus = _gpus(options)
    results = _results(options, gpus)
    if not options.virtual:
        subprocess.run([sys.executable, "-c", IMPORTS], check=False)  # from now on the files are in the page cache
    with ending_in_order():
        return Study(options, gpus, results).run()


def _check(options: Options) -> None:
    known = {ALONE, DEFAULT, NO_MANAGER, *names("carma.policies")}
    for word in options.only:
        policy, _, home = word.partition(":")
        if policy not in known or home not in ("", FRESH, KNOWN) or (home and policy in (ALONE, NO_MANAGER)):
            hint = f"Give {', '.join(sorted(known))}; policies also with :{KNOWN}."
            raise Usage(f"{word} is not a run of carma bench trace", hint)


def _gpus(options: Options) -> Gpus:
    if options.virtual:
        return VirtualGpus()
    check_torch("Install them, or use --virtual.", ("torch", "transformers"))
    try:
        gpus = RealGpus()
    except NoGpus as error:
        raise NoGpus(str(error), f"{WANTS_A_GPU} Without one: --virtual.") from error
    if options.split > 1 and gpus.count > 1:
        raise Usage("--split needs a single GPU", "Without it, tasks under exclusive do not run one after another.")
    return gpus


def _results(options: Options, gpus: Gpus) -> Results:
    """The file of the directory with --resume, else a new one."""
    folder = Path(options.out)
    exists = (folder / FILE).exists()
    if exists and not options.resume:
        raise Usage(f"{folder / FILE} exists", "Continue it with --resume, or choose another directory with --out.")
    if not exists:
        folder.mkdir(parents=True, exist_ok=True)
        return _new(options, gpus)
    found = read(folder)
    for name in ("trace", "span_s", "seconds", "seed", "virtual"):
        if getattr(found.plan, name) != getattr(options, name):
            raise Usage(f"the file was begun with another --{name.removesuffix('_s')}", f"Its command: {found.command}")
    if len(found.plan.tasks) != options.tasks:
        raise Usage(f"the file was begun with --tasks {len(found.plan.tasks)}", f"Its command: {found.command}")
    return found


def _new(options: Options, gpus: Gpus) -> Results:
    tasks = planned(options.trace, options.tasks, options.span_s, options.seed)
    work = ("trace", "span_s", "seconds", "seed", "virtual")
    kept = Options(**{name: getattr(options, name) for name in (*work, "tasks")})
    return Results(
        command=command_of("trace", kept),
        machine=msgspec.to_builtins(facts()),
        torch=None if options.virtual else _torch(),
        energy_from=gpus.energy_from(),
        plan=Plan(**{name: getattr(options, name) for name in work}, tasks=tasks),
    )


def _torch() -> str:
    done = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CarmaError(f"torch cannot be imported: {done.stderr.strip()[-500:]}")
    return done.stdout.strip()


def show(results: Results) -> None:
    rows = summary.rows_of(results)
    if rows:
        title = f"{len(results.plan.tasks)} tasks of trace {results.plan.trace} within {results.plan.span_s:g} s"
        print_table(title, summary.NARROW, [summary.cells(row) for row in rows])
