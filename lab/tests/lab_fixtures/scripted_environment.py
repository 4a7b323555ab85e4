"""A laboratory without a GPU: workers that are real processes with made-up rates, on a scripted NVML.

A worker follows a script of its workload's name: `rate`; `fail` (it ends before it is ready, with that text);
`die_at` (it ends at that order, the first being 1). Its rate falls with its thread percentage.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from carma.core.model.values import Gpu, GpuSample
from carma.monitor.nvml import NvmlSampler
from carma_lab.bench.gpu.environment import StudyMachine
from carma_lab.bench.gpu.meter import Gauges
from carma_lab.bench.gpu.workers import Worker
from tests.scripted_nvml import MIB, Card, ScriptedNvml

WORKER = """
import json, os, sys
script = json.load(open(sys.argv[1])).get(sys.argv[2], {})
if "fail" in script:
    sys.exit(script["fail"])
print(json.dumps({"reserved_mib": 100, "torch": "made up"}), flush=True)
percent = int(os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100"))
rate = script.get("rate", 10.0) * float(os.environ.get("FASTER", "1")) * percent / 100
for count, line in enumerate(sys.stdin, 1):
    if count == script.get("die_at"):
        print("CUDA error: made up", file=sys.stderr)
        os._exit(7)
    json.loads(line)
    print(json.dumps({"rate": rate, "steps": 9, "cpu": 0.5}), flush=True)
"""


class TickingSampler(NvmlSampler):
    """Half a second passes between two samples, and memory is what living workers are said to take."""

    def __init__(self, nvml: ScriptedNvml, footprint_mib: int) -> None:
        super().__init__(nvml, monotonic=nvml.monotonic, process_name=str)
        self.script, self.footprint_mib = nvml, footprint_mib
        self.workers: list[tuple[Worker, Gpu]] = []

    def sample(self, at: float) -> tuple[GpuSample, ...]:
        """The card's energy counter goes on with its power, and so does not depend on this machine's clock."""
        self.script.pass_s(0.5)
        for card in self.script.cards:
            card.energy_mj += card.power_mw // 2
            for place in card.mig or [card]:
                living = [worker for worker, gpu in self.workers if gpu.id == place.uuid and worker.lives]
                place.compute = [(worker.pid, self.footprint_mib * MIB) for worker in living]
                place.used_mib = len(living) * self.footprint_mib
        return super().sample(at)


class ScriptedLab(StudyMachine):
    def __init__(
        self, directory: Path, script: dict[str, Any], *cards: Card, footprint_mib: int = 1000, has_mps: bool = True
    ) -> None:
        (directory / "worker.py").write_text(WORKER)
        (directory / "script.json").write_text(json.dumps(script))
        self.ticking = TickingSampler(ScriptedNvml(*cards or [Card("GPU-a")]), footprint_mib)
        worker = (sys.executable, str(directory / "worker.py"), str(directory / "script.json"))
        gauges = Gauges(self.ticking.script)
        super().__init__(self.ticking, worker=worker, gauges=gauges, share=self._sharing, has_mps=has_mps)
        self.shared: list[str] = []

    def worker(self, name: str, gpu: Gpu, environment: dict[str, str], percent: int = 100) -> Worker:
        worker = super().worker(name, gpu, environment, percent)
        self.ticking.workers.append((worker, gpu))
        return worker

    def alive(self) -> list[int]:
        return [worker.pid for worker, _ in self.ticking.workers if worker.lives]

    @contextmanager
    def _sharing(self, mechanism: str) -> Iterator[dict[str, str]]:
        """Under MPS everything is made to be half as fast again."""
        self.shared.append(mechanism)
        yield {"FASTER": "1.5"} if mechanism == "mps" else {}
