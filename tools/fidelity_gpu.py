"""How true the simulator is on a real card: small training tasks under magm and MPS, recorded and simulated again.

    python -m tools.fidelity_gpu --out results/simulation/fidelity-h200
    python -m tools.fidelity_gpu --out /tmp/try --dry-run     on a virtual GPU, ten times as fast

Twenty tasks of `carma bench gpu` (torch, torchvision, made-up data, no downloads) come one after the other, each for
about `--seconds` alone on an H200 once it trains; with start-up and neighbours most are there for 60 to 120 seconds. A
daemon of its own runs them; what has not ended after `--limit` seconds is cancelled and counts with what it did. The
simulator is asked twice: with solo times that are worked out from the run, and, where `--table` (a file of `carma bench
interference`) knows the tasks, with the speed and demand that were measured of each alone, on another day.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from carma.bench.gpu import trial_task
from carma.bench.gpu.trial_shapes import SHAPES, Shape, drawn
from carma.bench.gpu.trial_task import VirtualCard
from carma.bench.private import PrivateDaemon, PrivateSettings, ending_in_order
from carma.core.model import Demand
from carma.errors import CarmaError, Refused
from carma.sim.fidelity_solo import Known
from carma.sim.power import H200
from carma.sim.record import Run
from tools.fidelity_record import Job, judge, keep, record, write_about

TABLE = Path("results/h200/interference-mps.json")
# Tasks of a minute would spend their lives waiting for the one before to settle, or for the gate, and hardly meet.
QUICK: dict[str, dict[str, object]] = {"warmup": {"settle_s": 2.0}, "window": {"length_s": 5.0}}
DRY_SPEED = 10.0
SPARE_MIB = 768  # above what the trial's users declare: a footprint has a context in it
UNKNOWN_MIB = 8_192  # for those who declare nothing there


class Alone(NamedTuple):
    """A task that trains alone."""

    steps_per_s: float
    demand: Demand


class Recorded:
    """One run, with what its tasks wrote into their own logs."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.shapes = SHAPES[: asked.tasks]
        self.speed = DRY_SPEED if asked.dry_run else 1.0
        self.logs: dict[str, list[dict[str, Any]]] = {}

    def run(self) -> Run:
        dry = self.asked.dry_run
        more = {"gate": {"enabled": self.asked.gate}, "monitor": {"period_s": 1.0 / self.speed}}
        settings = PrivateSettings(
            policy=self.asked.policy, gpus=1 if dry else 0, speed=self.speed, settings={**QUICK, **more}
        )
        return record(settings, self._jobs, self.asked.limit / self.speed, _say, self._read)

    def _jobs(self, daemon: PrivateDaemon) -> Sequence[Job]:
        program = daemon.work / "trial_task.py"
        shutil.copy(trial_task.__file__, program)
        return [
            Job(place * self.asked.gap, shape.workload, self._command(shape, program, daemon), memory_mib(shape))
            for place, shape in enumerate(self.shapes)
        ]

    def _command(self, shape: Shape, program: Path, daemon: PrivateDaemon) -> tuple[str, ...]:
        dry = self.asked.dry_run
        return (
            *(sys.executable, str(program), "train"),
            *("--steps", str(self.steps(shape))),
            *drawn(shape, virtual=dry),
            *(("--virtual",) if dry else ()),
            *("--log", str(daemon.work / f"{shape.workload}.log")),
        )

    def steps(self, shape: Shape) -> int:
        per_s = 1 / VirtualCard.STEP_S if self.asked.dry_run else shape.steps / shape.virtual.seconds
        seconds: float = self.asked.seconds
        return max(1, round(seconds * per_s))

    def _read(self, daemon: PrivateDaemon) -> None:
        for shape in self.shapes:
            found = sorted(daemon.work.glob(f"{shape.workload}.log.*"))  # one for each attempt
            lines = found[-1].read_text().splitlines() if found else []
            self.logs[shape.workload] = [json.loads(line) for line in lines if line.endswith("}")]

    def known(self, run: Run, table: Mapping[str, Alone]) -> dict[str, Known]:
        """From the first use on: what it took to get ready, and its steps at the speed that it has alone."""
        found = {}
        for shape in self.shapes:
            alone, ready_s = table.get(shape.workload), self._ready_s(run, shape.workload)
            if alone is not None and ready_s is not None:
                seconds = ready_s + self.steps(shape) / alone.steps_per_s
                found[shape.workload] = Known(seconds=seconds, demand=alone.demand, from_first_use=True)
        return found

    def _ready_s(self, run: Run, name: str) -> float | None:
        """From the first use of the GPU until it trains, by its own log."""
        task = next((task for task in run.tasks if task.name == name and task.outcome == "succeeded"), None)
        said: dict[str, float] = {line["what"]: line["at"] for line in self.logs.get(name, ())}
        if task is None or "ready" not in said or "done" not in said:
            return None
        last = task.attempts[-1]
        # Both tell when it ended, so that the two clocks need not begin together.
        return max(0.0, (last.ended_at - self.speed * (said["done"] - said["ready"])) - last.first_use)


def memory_mib(shape: Shape) -> int:
    return UNKNOWN_MIB if shape.declared_mib is None else shape.declared_mib + SPARE_MIB


def alone_in(path: Path) -> dict[str, Alone]:
    """Tasks alone, as `carma bench interference` measured them."""
    found: dict[str, Alone] = {}
    for row in json.loads(path.read_text())["rows"] if path.is_file() else ():
        if len(row["tasks"]) == 1 and row["percent"] == [100] and row["sm_active"] is not None:
            shown = {name: row[name] for name in ("sm_active", "sm_occupancy", "dram_active", "gr_active")}
            demand = Demand(**shown, power=H200.share_of(row["power_w"]))
            found.setdefault(row["tasks"][0], Alone(row["rates"][0], demand))
    return found


def made_up() -> dict[str, Alone]:
    """The same of virtual tasks, of which it is known exactly (trial_task.py)."""
    return {
        shape.workload: Alone(
            1 / VirtualCard.STEP_S, Demand(shape.virtual.sm, 0.45 * shape.virtual.sm, shape.virtual.dram)
        )
        for shape in SHAPES
    }


def _say(line: str) -> None:
    print(f"\r{line}", end="", file=sys.stderr, flush=True)


def main() -> int:
    asked = _parser().parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    try:
        _check(asked)
        with ending_in_order():
            recorded = Recorded(asked)
            run = recorded.run()
    except CarmaError as error:
        print(f"\n{error}. {error.hint}", file=sys.stderr)
        return error.exit_code
    print(file=sys.stderr)
    keep(run, asked.out / "run.json")
    (asked.out / "logs.json").write_text(json.dumps(recorded.logs) + "\n")
    facts = {"dry_run": asked.dry_run, "mechanism": run.about.mechanism, "took_s": round(time.monotonic() - began, 1)}
    write_about(asked.out, "tools.fidelity_gpu", facts)
    first = judge(run, "fidelity", asked.out)
    known = recorded.known(run, made_up() if asked.dry_run else alone_in(asked.table))
    if known:
        judge(run, "fidelity-solo", asked.out, known)
    else:
        print(f"{asked.table} knows none of these tasks, so that no solo time is known from elsewhere")
    return 0 if first is not None else 1


def _check(asked: argparse.Namespace) -> None:
    """Said at once, and not by twenty tasks that fail."""
    missing = [name for name in ("torch", "torchvision") if importlib.util.find_spec(name) is None]
    if missing and not asked.dry_run:
        raise Refused(
            f"{' and '.join(missing)} cannot be imported by {sys.executable}", "Run it with a Python that has it."
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="How true the simulator is on this machine's GPU.")
    add = parser.add_argument
    add("--out", type=Path, required=True, help="where the run and the judgements are written")
    add("--tasks", type=int, default=len(SHAPES), help=f"of the {len(SHAPES)} that there are ({len(SHAPES)})")
    add("--seconds", type=float, default=36.0, help="that each trains, alone on an H200 (36)")
    add("--gap", type=float, default=4.0, help="seconds between two submissions (4)")
    add("--limit", type=float, default=450.0, help="seconds after which what still runs is cancelled (450)")
    add("--policy", default="magm", help="magm")
    add("--table", type=Path, default=TABLE, help=f"tasks alone, by carma bench interference ({TABLE})")
    add("--gate", action="store_true", help="leave the gate on: tasks meet less often")
    add("--dry-run", action="store_true", help="on a virtual GPU, ten times as fast")
    return parser


if __name__ == "__main__":
    sys.exit(main())
