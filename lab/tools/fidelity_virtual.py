"""The simulator's errors on virtual GPUs: real processes under a real daemon, recorded and simulated again.

    python -m lab.tools.fidelity_virtual --out lab/results/simulation/fidelity

24 tasks on two virtual GPUs whose clock runs ten times as fast: under `exclusive`, under `magm`, and under `magm` with
smaller cards and no declared memory; three to five minutes each. The simulator is asked for each run by
itself, and for the others once more with solo times from the exclusive one. The virtual GPUs share by the same model as
the simulator, so what is seen here is all else: launching, sampling, the order of decisions, what is worked out from a
run's file.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from carma.demo.replay import command_of
from carma.testing.private_daemon import PrivateDaemon, PrivateSettings, ending_in_order
from carma.traces import Trace, TraceTask
from carma_lab.traces.writer import write
from lab.tools.fidelity_record import Job, files, judge_all, keep, parser, record, write_about

SHOWN = ("sm_active", "sm_occupancy", "dram_active", "start_s", "ramp_s")
KINDS = (  # name, MiB, seconds, SHOWN: like the small and the larger tasks of the traces
    ("cifar", 2_200, 150.0, 0.16, 0.07, 0.05, 8.0, 10.0),
    ("mobilenet", 4_000, 210.0, 0.35, 0.16, 0.22, 9.0, 20.0),
    ("resnet", 7_100, 260.0, 0.45, 0.20, 0.24, 9.0, 20.0),
    ("vgg", 9_800, 240.0, 0.62, 0.27, 0.31, 9.0, 20.0),
    ("bert", 12_600, 300.0, 0.72, 0.29, 0.35, 16.0, 20.0),
)
TASKS, GAP_S, SPEED, GPUS = 24, 45.0, 10.0, 2
LIMIT_S = 600.0


def trace(seed: int = 6, tasks: int = TASKS) -> Trace:
    dice = random.Random(seed)
    rows, at = [], 0.0
    for number in range(tasks):
        name, mib, seconds, *demand = KINDS[number % len(KINDS)]
        shown: dict[str, Any] = dict(zip(SHOWN, demand, strict=True))
        rows.append(TraceTask(arrival_s=round(at, 1), name=name, gpus=1, memory_mib=mib, seconds=seconds, **shown))
        at += dice.expovariate(1 / GAP_S)
    return Trace(name="virtual.csv", tasks=tuple(rows), source=f"Made by lab/tools/fidelity_virtual.py, seed {seed}.")


VARIANTS = {
    "exclusive": PrivateSettings(policy="exclusive"),
    "magm": PrivateSettings(policy="magm"),
    # No memory is declared or estimated, and the cards are small: tasks run out of memory and are retried.
    "unknown": PrivateSettings(policy="magm", gpu_memory_mib=16_384, settings={"memory": {"sources": []}}),
}


def settings_of(variant: str, speed: float, period_s: float) -> PrivateSettings:
    wanted = VARIANTS[variant]
    return replace(wanted, gpus=GPUS, speed=speed, settings={**wanted.settings, "monitor": {"period_s": period_s}})


def main() -> int:
    asked = _parser().parse_args()
    runs = files(asked)
    if not asked.judge:
        with ending_in_order():
            _record(asked, runs)
    judge_all(asked.out, runs)
    return 0


def _record(asked: argparse.Namespace, runs: dict[str, Path]) -> None:
    wanted = trace(tasks=asked.tasks)
    write(wanted, asked.out / "virtual.csv")
    jobs = [Job(row.arrival_s, row.name, command_of(row), row.memory_mib, row.gpus) for row in wanted.tasks]
    write_about(asked.out, "lab.tools.fidelity_virtual", {"speed": asked.speed, "period_s": asked.period})
    for variant, path in runs.items():
        with PrivateDaemon(settings_of(variant, asked.speed, asked.period)) as daemon:
            keep(record(daemon, jobs, LIMIT_S, variant), path)


def _parser() -> argparse.ArgumentParser:
    made = parser("How accurate the simulator is on virtual GPUs.", "--variants", VARIANTS, TASKS)
    made.add_argument("--speed", type=float, default=SPEED)
    made.add_argument("--period", type=float, default=0.2, help="real seconds between samples")
    return made


if __name__ == "__main__":
    sys.exit(main())
