"""What the studies need of a machine: its GPUs, workers on them, and ways for these to share. Fakes stand in for tests.

A card's modes are left alone. The MPS control daemon is our own, in a directory of its own, and ends with the study; it
does not use launch/mps.py, whose servers belong to a CARMA daemon and outlive it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from carma.core.model.values import Gpu
from carma.errors import NoGpus, NotFound, Refused
from carma.monitor.nvml import NvmlSampler, load_nvml, open_nvml
from carma_lab.bench.gpu.meter import FROM_COUNTER, FROM_POWER, Gauges, Reading, read
from carma_lab.bench.gpu.workers import Span, Worker, WorkerDied, all_answers, close_all
from carma_lab.bench.machine import WANTS_A_GPU

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
            check=not words,  # the study is over when it is told to quit
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
        self.has_mps = shutil.which(CONTROL) is not None if has_mps is None else has_mps

    def __enter__(self) -> StudyMachine:
        return self

    def __exit__(self, *_: object) -> None:
        self.sampler.close()

    def gpu(self, wanted: str | None) -> Gpu:
        """By index or UUID; the first one where none is named."""
        gpus = self.sampler.gpus()
        for gpu in gpus:
            if wanted in (None, str(gpu.index), gpu.id):
                return gpu
        have = ", ".join(f"{gpu.index} ({gpu.id})" for gpu in gpus)
        raise NotFound(f"There is no GPU {wanted}.", f"There are: {have}.")

    def energy_from(self, gpu: Gpu) -> str | None:
        """Where figures of energy come from, for the record."""
        if gpu.capabilities.energy and gpu.kind == "card":
            return FROM_COUNTER
        return FROM_POWER if gpu.capabilities.power else None

    def instances(self) -> tuple[Gpu, ...]:
        return tuple(gpu for gpu in self.sampler.gpus() if gpu.kind == "mig")

    def worker(self, name: str, gpu: Gpu, environment: dict[str, str], percent: int = 100) -> Worker:
        """A worker on that GPU. Where there is only one, it need not be named."""
        only = len(self.sampler.gpus()) == 1 and gpu.kind == "card"
        where = {} if only else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": gpu.id}
        return Worker(name, self._worker, {**environment, **where}, percent)

    def together(
        self, workers: Sequence[Worker], gpus: Sequence[Gpu], span: Span
    ) -> tuple[list[dict[str, Any]], Reading]:
        """These workers at the same time: each one's answer, and what the GPUs showed. Raises Died."""
        start = time.monotonic() + 0.02
        for worker in workers:
            worker.order(start, span)
        reading = read(self.sampler, self.gauges, gpus, start + span.warm_s, span.measure_s)
        return all_answers(workers, span), reading


def ready_workers(workers: Sequence[Worker], tell: Callable[[str], None]) -> list[tuple[Worker, dict[str, Any]]]:
    """Wait for all. One that this machine's torch or memory cannot run is closed, and told of."""
    found: list[tuple[Worker, dict[str, Any]]] = []
    for worker in workers:
        try:
            found.append((worker, worker.ready()))
        except WorkerDied as death:
            tell(f"left out: {death}")
            close_all([worker])
    return found


def open_machine() -> StudyMachine:
    """This machine's. Says at once what is missing: a GPU, or torch."""
    try:
        sampler = open_nvml(engine_s=0.0)
    except NoGpus as error:
        raise NoGpus(str(error), WANTS_A_GPU) from error
    missing = [name for name in ("torch", "torchvision") if importlib.util.find_spec(name) is None]
    if missing:
        sampler.close()
        raise Refused(
            f"The study trains real models, and {' and '.join(missing)} cannot be imported by {sys.executable}.",
            "Install them beside carma: pip install torch torchvision",
        )
    return StudyMachine(sampler, gauges=Gauges(load_nvml()))  # two figures are read past the sampler (meter.py)
