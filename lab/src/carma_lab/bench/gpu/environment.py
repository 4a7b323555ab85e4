"""Common parts of the studies of sharing. Tests substitute the sampler, the workers and the mechanism.

1. `StudyMachine`: GPUs, workers on them, and the mechanisms by which workers share a GPU.
2. `Study`: workers, clock, what was left out, and the head of the file of one run.

The modes of a card are not changed. The MPS control daemon has a directory of its own and ends with the study; it is
not that of launch/mps.py, whose servers belong to a CARMA daemon and outlive it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from carma.core.model.values import Gpu
from carma.errors import NoGpus, NotFound, Refused
from carma.monitor.nvml import NvmlSampler, load_nvml, open_nvml
from carma_lab.bench.gpu.meter import FROM_COUNTER, FROM_POWER, Gauges, Reading, read
from carma_lab.bench.gpu.workers import Span, Worker, WorkerDied, all_answers, close_all
from carma_lab.bench.machine import WANTS_A_GPU, facts
from carma_lab.bench.results_file import command_of, say

WORKER = (sys.executable, "-m", "carma_lab.bench.gpu.worker")
CONTROL = "nvidia-cuda-mps-control"
CONTROL_LIMIT_S = 30.0
NO_MPS = "/nonexistent/carma-mps"  # a pipe directory that is not there: a machine-wide MPS is not joined by accident

Share = Callable[[str], AbstractContextManager[dict[str, str]]]


@contextmanager
def sharing(mechanism: str) -> Iterator[dict[str, str]]:
    """The environment in which workers share a GPU that way; an MPS control daemon of our own where wanted."""
    if mechanism != "mps":
        yield {"CUDA_MPS_PIPE_DIRECTORY": NO_MPS}
        return
    with tempfile.TemporaryDirectory(prefix="carma-mps-", ignore_cleanup_errors=True) as directory:
        environment = {"CUDA_MPS_PIPE_DIRECTORY": directory, "CUDA_MPS_LOG_DIRECTORY": directory}
        _control(["-d"], environment, "")
        try:
            yield environment
        finally:
            _control([], environment, "quit\n")


def _control(arguments: list[str], environment: dict[str, str], words: str) -> None:
    try:
        subprocess.run(
            [CONTROL, *arguments],
            input=words,
            text=True,
            env={**os.environ, **environment},
            stdout=subprocess.DEVNULL,
            check=not words,  # the study has ended when the control daemon is stopped
            timeout=CONTROL_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        if not words:
            raise Refused(f"{CONTROL} does not answer within {CONTROL_LIMIT_S:.0f} s.", _WITHOUT_MPS) from None
    except (OSError, subprocess.CalledProcessError) as error:
        raise Refused(f"MPS cannot be started: {error}.", _WITHOUT_MPS) from error


_WITHOUT_MPS = "Measure without it: --mechanism timeslice."


class StudyMachine:
    """`worker` is the command of a worker, to which a workload's name is added."""

    def __init__(
        self,
        sampler: NvmlSampler,
        *,
        worker: Sequence[str] = WORKER,
        gauges: Gauges,
        share: Share = sharing,
        has_mps: bool | None = None,
    ) -> None:
        self.sampler, self.gauges, self.share = sampler, gauges, share
        self._worker = tuple(worker)
        self._places: dict[Worker, Gpu] = {}
        self.has_mps = shutil.which(CONTROL) is not None if has_mps is None else has_mps

    def __enter__(self) -> StudyMachine:
        return self

    def __exit__(self, *_: object) -> None:
        self.sampler.close()

    def gpu(self, wanted: str | None) -> Gpu:
        """The GPU with that index or UUID; the first GPU if none is named."""
        gpus = self.sampler.gpus()
        for gpu in gpus:
            if wanted in (None, str(gpu.index), gpu.id):
                return gpu
        have = ", ".join(f"{gpu.index} ({gpu.id})" for gpu in gpus)
        raise NotFound(f"There is no GPU {wanted}.", f"There are: {have}.")

    def energy_from(self, gpu: Gpu) -> str | None:
        """Source of the energy figures, for the record."""
        if gpu.capabilities.energy and gpu.kind == "card":
            return FROM_COUNTER
        return FROM_POWER if gpu.capabilities.power else None

    def instances(self) -> tuple[Gpu, ...]:
        return tuple(gpu for gpu in self.sampler.gpus() if gpu.kind == "mig")

    def worker(self, name: str, gpu: Gpu, environment: dict[str, str], percent: int = 100) -> Worker:
        """A worker on that GPU. Where there is only one, it need not be named."""
        only = len(self.sampler.gpus()) == 1 and gpu.kind == "card"
        where = {} if only else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": gpu.id}
        worker = Worker(name, self._worker, {**environment, **where}, percent)
        self._places[worker] = gpu
        return worker

    def together(self, workers: Sequence[Worker], span: Span) -> tuple[list[dict[str, Any]], Reading]:
        """Runs workers at the same time: the answer of each, and the activity of their GPUs. Raises WorkerDied."""
        gpus = list(dict.fromkeys(self._places[worker] for worker in workers))
        start = time.monotonic() + 0.02
        for worker in workers:
            worker.order(start, span)
        reading = read(self.sampler, self.gauges, gpus, start + span.warm_s, span.measure_s)
        return all_answers(workers, span), reading


class Study:
    """One run of a study: its workers, its clock, what was left out, and the head of its file."""

    def __init__(self, verb: str, options: Any, machine: StudyMachine, warm_s: float) -> None:
        self.left_out: list[str] = []
        self._verb, self._options, self._machine = verb, options, machine
        self._gpu = machine.gpu(options.gpu)
        self._span = Span(min(warm_s, options.seconds), options.seconds)
        self._began = time.monotonic()
        self._ready: dict[str, dict[str, Any]] = {}  # the first answer of each workload

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def _tell(self, what: str) -> None:
        self.left_out.append(what)
        say(what)

    def _start(
        self, places: Iterable[tuple[str, Gpu]], environment: dict[str, str], stack: ExitStack, percent: int = 100
    ) -> list[Worker]:
        """Workers on their GPUs, ready. One that this machine's torch or memory cannot run is left out."""
        workers = [self._machine.worker(name, gpu, environment, percent) for name, gpu in places]
        stack.callback(close_all, workers)
        ready: list[Worker] = []
        for worker in workers:
            try:
                self._ready.setdefault(worker.name, worker.ready())
                ready.append(worker)
            except WorkerDied as death:
                self._tell(f"left out: {death}")
                close_all([worker])
        return ready

    def _head(self) -> dict[str, Any]:
        """The machine, the versions, the command that measures it again, and what was left out."""
        gpu, sampler, machine = self._gpu, self._machine.sampler, facts()
        return {
            "gpu": gpu.name,
            "memory_mib": gpu.memory_mib,
            "activity_from": gpu.capabilities.source,
            "driver": sampler.driver(),
            "torch": next((answer["torch"] for answer in self._ready.values()), ""),
            **{name: getattr(machine, name) for name in ("python", "carma", "cpu", "cores", "date")},
            "command": command_of(self._verb, self._options),
            "warm_s": self._span.warm_s,
            "measure_s": self._span.measure_s,
            "energy_from": self._machine.energy_from(gpu),
            "left_out": self.left_out,
        }


def check_torch(hint: str, packages: Sequence[str] = ("torch", "torchvision")) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        what = f"The tasks are real models, and {' and '.join(missing)} cannot be imported by {sys.executable}."
        raise Refused(what, hint)


def open_machine() -> StudyMachine:
    """This machine. Reports at once what is missing: a GPU, or torch."""
    try:
        sampler = open_nvml(engine_s=0.0)
    except NoGpus as error:
        raise NoGpus(str(error), WANTS_A_GPU) from error
    try:
        check_torch("Install them beside carma: pip install torch torchvision")
    except Refused:
        sampler.close()
        raise
    return StudyMachine(sampler, gauges=Gauges(load_nvml()))  # two figures are read past the sampler (meter.py)
