"""`carma bench gpu`: a private daemon on this machine's GPUs, real training tasks, and tests of what the documentation
promises about sharing.

Each part writes its JSON file as soon as it is done: `tasks` and `exclusive` tasks.json, `oom` oom.json, `restart`
restart.json. A part that fails is recorded as failed, and the next one runs. All of it ends within the limit; what that
leaves no time for is named, and counts as not shown.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec

from carma.core.model.units import show_count
from carma.errors import CarmaError, NoGpus, Usage
from carma.monitor.nvml import open_nvml
from carma.testing.private_daemon import ending_in_order
from carma_lab.bench.gpu import trial_oom, trial_restart, trial_tasks
from carma_lab.bench.gpu.environment import check_torch
from carma_lab.bench.gpu.trial_server import PARTS, VIRTUAL_MEMORY_MIB, Options, Stage
from carma_lab.bench.machine import WANTS_A_GPU, facts
from carma_lab.bench.results_file import command_of, write

__all__ = ["PARTS", "Options", "run"]

FILES = {"tasks": "tasks.json", "exclusive": "tasks.json", "oom": "oom.json", "restart": "restart.json"}
# About what a part takes on an H200. What is left of the limit is shared out so among the parts that are still to come,
# so what one leaves over the next ones have, and the last has all of it.
USUAL_S = {"tasks": 110.0, "oom": 35.0 * len(trial_oom.RUNGS), "restart": 70.0, "exclusive": 290.0}
LEAST_S = 5.0  # a part is not begun with less


class Trial:
    """One run. `found` are the parts' results so far, `short` what they did not show."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.out = Path(options.out)
        self.began = time.monotonic()
        self.about: dict[str, Any] = {}
        self.found: dict[str, dict[str, Any]] = {}
        self.short: list[str] = []
        self.took_s: dict[str, float] = {}

    def run(self) -> int:
        self.out.mkdir(parents=True, exist_ok=True)
        self.about = _about(self.options)
        for name in PARTS:
            if name in self.options.parts:
                self._part(name)
        for line in self.short:
            print(f"falls short: {line}", flush=True)
        print(f"done after {time.monotonic() - self.began:.0f} s; results in {self.out}", flush=True)
        return 1 if self.short else 0

    def _part(self, name: str) -> None:
        began = time.monotonic()
        until = began + (self.began + self.options.limit_s - began) * share_of(name, self.options)
        stage = Stage(name, self.options, self.about["gpus"][0]["memory_mib"], self.began, until)
        result, short = self._tried(name, stage)
        self.short += short
        self._write(name, result, time.monotonic() - began)
        stage.say("done" if not short else f"done; {show_count(len(short), 'thing')} not shown")

    def _tried(self, name: str, stage: Stage) -> tuple[dict[str, Any], list[str]]:
        if stage.left_s < LEAST_S:
            stage.say(f"skipped: {stage.too_little}")
            return {"skipped": stage.too_little}, [f"{name}: skipped: {stage.too_little}"]
        stage.say(f"begins, with {stage.left_s:.0f} s")
        try:
            return self._do(name, stage)
        except Exception as error:
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {error}"}, [f"{name}: {error}"]

    def _do(self, name: str, stage: Stage) -> tuple[dict[str, Any], list[str]]:
        if name == "exclusive":
            if "tasks" not in self.found:
                raise CarmaError("there is nothing to compare it with", "run the part `tasks` with it")
            result = trial_tasks.exclusive(stage, self.found["tasks"])
            return result, trial_tasks.not_compared(result)
        part = {"tasks": trial_tasks, "oom": trial_oom, "restart": trial_restart}[name]
        result = part.run(stage)
        self.found[name] = result
        return result, part.shortfalls(result)

    def _write(self, name: str, result: dict[str, Any], took_s: float) -> None:
        """What an `exclusive` that failed or was skipped would overwrite stays, with the reason beside it."""
        if name == "exclusive" and not result.keys().isdisjoint(("error", "skipped")):
            result = {**self.found.get("tasks", {}), "exclusive": result}
        self.took_s[name] = round(took_s, 1)
        spans = {part: span for part, span in self.took_s.items() if FILES[part] == FILES[name]}
        write({"about": {**self.about, "took_s": spans}, **result}, self.out / FILES[name])


def run(options: Options) -> int:
    """0 when everything that was to be shown was shown."""
    unknown = sorted(set(options.parts) - set(PARTS))
    if unknown:
        raise Usage(f"there is no part {', '.join(unknown)}", f"parts: {', '.join(PARTS)}")
    if not options.virtual:
        _check_machine()
    with ending_in_order():
        return Trial(options).run()


def _check_machine() -> None:
    """Says at once what is missing: a GPU, or torch."""
    try:
        open_nvml().close()
    except NoGpus as error:
        raise NoGpus(str(error), f"{WANTS_A_GPU} Without one: --virtual.") from error
    check_torch("Install them, or use --virtual.")


def share_of(name: str, options: Options) -> float:
    """A part's share of the time that is left when it begins."""
    to_come = PARTS[PARTS.index(name) :]
    usual_s = {part: USUAL_S[part] for part in to_come if part in options.parts}
    if "oom" in usual_s and options.rungs:
        usual_s["oom"] *= len(options.rungs) / len(trial_oom.RUNGS)
    return usual_s[name] / sum(usual_s.values())


def _about(options: Options) -> dict[str, Any]:
    """Everything that is needed to run it again."""
    about = {"command": command_of("gpu", options), "machine": msgspec.to_builtins(facts()), "virtual": options.virtual}
    if options.virtual:
        return {**about, "gpus": [{"name": "virtual", "memory_mib": VIRTUAL_MEMORY_MIB, "kind": "virtual"}]}
    with contextlib.closing(open_nvml()) as sampler:
        cards = [{"name": gpu.name, "memory_mib": gpu.memory_mib, "kind": gpu.kind} for gpu in sampler.gpus()]
        return {**about, "gpus": cards, "driver": sampler.driver()}
