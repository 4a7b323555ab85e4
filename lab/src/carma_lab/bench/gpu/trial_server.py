"""A private daemon as the trial uses it: through the command line, as a user would, each call a process of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from carma.core.model.values import Record
from carma.errors import CarmaError
from carma.testing.private_daemon import PrivateDaemon, PrivateSettings
from carma.wire.api_types import GpuView, TaskView
from carma_lab.bench.gpu import trial_task

PARTS = ("tasks", "oom", "restart", "exclusive")
NOT_VIRTUAL = "virtual GPUs have no MPS"  # reason of a skipped part that virtual GPUs cannot have


class Options(Record, frozen=True, kw_only=True):
    """The options of `carma bench gpu`."""

    out: str = "."
    limit_s: float = 900.0
    parts: tuple[str, ...] = PARTS
    virtual: bool = False
    tasks: int = 20
    scale: float = 1.0  # shorter or longer tasks
    rungs: tuple[str, ...] = ()  # of the oom part; empty: all
    table: str = "lab/results/h200/interference-mps.json"  # each workload alone, for comparison; may be missing


@dataclass
class Stage:
    """One part's share of the time."""

    name: str
    options: Options
    gpu_memory_mib: int  # of the first GPU
    began: float  # of the trial, as `until`
    until: float  # monotonic
    said_at: float = float("-inf")

    @property
    def left_s(self) -> float:
        return self.until - time.monotonic()

    @property
    def over(self) -> bool:
        return self.left_s <= 0.0

    @property
    def too_little(self) -> str:
        """Why something is skipped for want of time."""
        return f"only {max(0.0, self.left_s):.0f} s were left"

    def say(self, text: str, every_s: float = 0.0) -> None:
        """Prints a message with the seconds since the trial began, at most at the requested rate."""
        now = time.monotonic()
        if now - self.said_at >= every_s:
            self.said_at = now
            print(f"[{now - self.began:5.0f} s] {self.name}: {text}", flush=True)


T = TypeVar("T")
CALL_LIMIT_S = 60.0
LOOK_S = 1.0  # each query starts a process
TROUBLE_S = 3.0  # between two checks, while waiting for a line in a log, whether the task has ended instead
VIRTUAL_MEMORY_MIB = 40_960

Line = dict[str, Any]  # of a task's own log
Tables = dict[str, dict[str, object]]


class Work(Record, frozen=True, kw_only=True):
    """One task to submit: its name, what it tells about its memory, and the arguments of trial_task.py."""

    name: str
    arguments: tuple[str, ...]
    gpu_memory_mib: int | None = None


class Server(PrivateDaemon):
    """A private daemon whose tasks run a copy of trial_task.py in the work directory."""

    def __init__(self, *, virtual: bool, settings: Tables, policy: str = "magm") -> None:
        quick: Tables = {"monitor": {"period_s": 0.2}} if virtual else {}  # virtual tasks of the trial are short
        gpus = 1 if virtual else 0
        tables = {**settings, **quick}
        super().__init__(PrivateSettings(policy=policy, gpus=gpus, gpu_memory_mib=VIRTUAL_MEMORY_MIB, settings=tables))
        self.virtual = virtual

    def __enter__(self) -> Server:
        super().__enter__()
        self.program = self.work / "trial_task.py"
        shutil.copy(trial_task.__file__, self.program)
        return self

    def call(self, *words: str) -> str:
        """`carma ...`; its standard output. What it complains of becomes the error's message."""
        done = subprocess.run(
            [sys.executable, "-m", "carma", *words],
            env={**self.environment, "COLUMNS": "300"},  # sentences in one line
            cwd=self.work,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CALL_LIMIT_S,
            check=False,
        )
        if done.returncode != 0:
            raise CarmaError(f"carma {words[0]} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
        return done.stdout

    def ask(self, kind: type[T], *words: str) -> T:
        return msgspec.json.decode(self.call(*words, "--json").encode(), type=kind)

    def submit(self, work: Work) -> int:
        memory = () if work.gpu_memory_mib is None else ("--gpu-mem", f"{work.gpu_memory_mib}MiB")
        virtual = ("--virtual",) if self.virtual else ()
        command = (sys.executable, str(self.program), *work.arguments, *virtual, "--log", str(self._log_of(work.name)))
        return int(self.call("submit", "--parsable", "--name", work.name, *memory, "--", *command))

    def show(self, task: int) -> TaskView:
        return self.ask(TaskView, "show", str(task))

    def queue(self) -> list[TaskView]:
        return self.ask(list[TaskView], "queue")

    def history(self) -> list[TaskView]:
        return self.ask(list[TaskView], "history", "-n", "1000")

    def gpus(self) -> list[GpuView]:
        return self.ask(list[GpuView], "gpus")

    def wait(self, tasks: Sequence[int], until: float) -> bool:
        """Whether all of them had ended by `until` (monotonic)."""
        while unfinished(self.queue(), tasks):
            if time.monotonic() > until:
                return False
            time.sleep(LOOK_S)
        return True

    def wait_for_line(self, names: Sequence[str], what: str, until: float) -> None:
        """Waits until each of those tasks has printed `what`; an error if one has ended or the time is over."""
        looked_at = time.monotonic()
        while missing := [name for name in names if not first(self.log(name), what)]:
            over = time.monotonic() > until
            if over or time.monotonic() - looked_at > TROUBLE_S:
                looked_at = time.monotonic()
                ended = {view.name for view in self.history()}.intersection(missing)
                if over or (ended and not all(first(self.log(name), what) for name in ended)):
                    raise CarmaError(f"{', '.join(missing)} did not come to {what!r}: {self._troubles(missing)}")
            time.sleep(0.05)

    def log(self, name: str, attempt: int = 1) -> list[Line]:
        """What the task itself wrote in that attempt; a last line that is cut short is left out."""
        path = Path(f"{self._log_of(name)}.{attempt}")
        lines: list[Line] = []
        for text in path.read_text().splitlines() if path.exists() else ():
            try:
                lines.append(json.loads(text))
            except ValueError:
                break
        return lines

    def _log_of(self, name: str) -> Path:
        return self.work / f"{name}.log"

    def _troubles(self, names: Sequence[str]) -> str:
        found = {view.name: view for view in (*self.queue(), *self.history())}
        states = (f"{name} is {found[name].state} {found[name].reason}".strip() for name in names if name in found)
        return "; ".join(states) or "they are not known"


def unfinished(queue: Sequence[TaskView], tasks: Sequence[int]) -> list[int]:
    """`carma queue` lists all that have not ended."""
    waiting = {view.id for view in queue}
    return [task for task in tasks if task in waiting]


def first(lines: Sequence[Line], what: str) -> Line | None:
    """The first line of that kind."""
    return next((line for line in lines if line["what"] == what), None)


def last(lines: Sequence[Line], *what: str) -> Line | None:
    return next((line for line in reversed(lines) if line["what"] in what), None)


ATTEMPT_FIELDS = (
    *("number", "booking_mib", "booking_source", "alone", "cap_mib", "mechanism", "guards", "note"),
    *("observed_mib", "activity", "energy_j", "outcome", "blame"),
)


def summary(view: TaskView) -> dict[str, Any]:
    """A task's record as the JSON files keep it: every attempt, nothing that is only of this machine."""
    return {
        "name": view.name,
        "outcome": (view.outcome or {}).get("kind"),
        "declared_mib": view.gpu_memory_mib,
        "energy_j": view.energy_j,
        "attempts": [
            {name: msgspec.to_builtins(getattr(attempt, name)) for name in ATTEMPT_FIELDS}
            | {"ran_s": _span(attempt.started_at, attempt.ended_at)}
            for attempt in view.attempts
        ],
    }


def _span(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else round(end - begin, 3)
