"""What sharing gains on a real card, and how true the simulator is there: one set of tasks under several policies.

    python -m lab.tools.fidelity_gpu --out lab/results/simulation/fidelity-h200
    python -m lab.tools.fidelity_gpu --out /tmp/try --dry-run     on a virtual GPU, ten times as fast

Tasks of `carma bench gpu` (torch, torchvision, made-up data, no downloads) come one after the other, each for about
`--seconds` alone on an H200 once it trains. A daemon of its own runs them under each policy in turn, the first time
alone, so that `goodput` knows them from its history as a server does where commands repeat. Each run is recorded and
simulated again: by itself, and with what tasks showed alone in the first run. `--judge` judges by the runs that are
there. What has not ended after `--limit` seconds is cancelled and counts with what it did.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from carma.errors import CarmaError
from carma.testing.private_daemon import PrivateDaemon, PrivateSettings, ending_in_order
from carma_lab.bench.gpu import trial_task
from carma_lab.bench.gpu.environment import check_torch
from carma_lab.bench.gpu.trial_shapes import BY_WORKLOAD, Shape, drawn
from carma_lab.bench.gpu.trial_task import VirtualCard
from lab.tools.fidelity_record import Job, files, judge_all, keep, parser, record, write_about

# Tasks of half a minute would spend their lives waiting for the one before to settle, or for the gate, and hardly meet.
QUICK: dict[str, dict[str, object]] = {"warmup": {"settle_s": 2.0}, "window": {"length_s": 5.0}}
OPEN: dict[str, dict[str, object]] = {"gate": {"enabled": False}}
RUNS: dict[str, PrivateSettings] = {
    "exclusive": PrivateSettings(policy="exclusive", settings=QUICK),
    "goodput": PrivateSettings(policy="goodput", settings=QUICK),
    "magm-open": PrivateSettings(policy="magm", settings={**QUICK, **OPEN}),
    "magm": PrivateSettings(policy="magm", settings=QUICK),
}
# Those that keep the whole card busy alone, and those that do not, in turns.
TASKS = (
    *("vgg16-224-b32", "mlp-512x4-b256", "resnet18-224-b32", "encoder-256x4-b32"),
    *("resnet50-224-b64-bf16", "resnet18-cifar-b32", "mlp-4096x6-b512", "densenet121-224-b32"),
    *("mobilenet-224-b64", "lstm-512x2-b64", "vit-b16-224-b32-bf16", "resnet50-224-b32-cpu40"),
)
DRY_SPEED = 10.0
SPARE_MIB = 768  # above what the trial's users declare: a footprint has a context in it
UNKNOWN_MIB = 8_192  # for those who declare nothing there


class Recorder:
    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.shapes = [BY_WORKLOAD[name] for name in TASKS[: asked.tasks]]
        self.speed = DRY_SPEED if asked.dry_run else 1.0

    def settings(self, name: str) -> PrivateSettings:
        tables = {**RUNS[name].settings, "monitor": {"period_s": 1.0 / self.speed}}
        return replace(RUNS[name], gpus=1 if self.asked.dry_run else 0, speed=self.speed, settings=tables)

    def record(self, runs: dict[str, Path]) -> None:
        """One home for all of them: what tasks took and showed under one policy is known under the next."""
        first = next(iter(runs))
        with PrivateDaemon(self.settings(first)) as daemon:
            jobs = self.jobs(daemon)
            for name, path in runs.items():
                if name != first:
                    daemon.restart(self.settings(name))
                limit_s = self.asked.limit / self.speed
                keep(record(daemon, jobs, limit_s, name), path)

    def jobs(self, daemon: PrivateDaemon) -> Sequence[Job]:
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


def memory_mib(shape: Shape) -> int:
    return UNKNOWN_MIB if shape.declared_mib is None else shape.declared_mib + SPARE_MIB


def main() -> int:
    asked = _parser().parse_args()
    runs = files(asked)
    try:
        if not asked.judge:
            if not asked.dry_run:
                check_torch("Run it with a Python that has them, or use --dry-run.")
            write_about(asked.out, "lab.tools.fidelity_gpu", {"dry_run": asked.dry_run})
            with ending_in_order():
                Recorder(asked).record(runs)
        judge_all(asked.out, runs)
    except CarmaError as error:
        print(f"\n{error}. {error.hint}", file=sys.stderr)
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    made = parser("What sharing gains on this GPU, and how accurate simulations are.", "--runs", RUNS, len(TASKS))
    add = made.add_argument
    add("--seconds", type=float, default=30.0, help="training time of a task alone on an H200 (default: 30)")
    add("--gap", type=float, default=4.0, help="seconds between two submissions (default: 4)")
    add("--limit", type=float, default=600.0, help="seconds after which running tasks are cancelled (default: 600)")
    add("--dry-run", action="store_true", help="use a virtual GPU, ten times as fast")
    return made


if __name__ == "__main__":
    sys.exit(main())
