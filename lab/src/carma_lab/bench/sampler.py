"""`carma bench sampler`: processor time of sampling the GPUs. Figures only: nothing passes or fails.

Samples are taken at the rates of a daemon (all metrics once a second, memory five times a second). Other rates would
hide calls that are made rarely, and GPM's counters cannot be read faster. A machine with fewer cards than requested
reads each of them several times. The cost of each call into NVML is measured in a run of its own, since measuring
costs something too.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple

from carma.core.model.values import Record
from carma.demo.figures import percentile
from carma.errors import NoGpus, Usage
from carma.monitor.dcgm import DcgmThread
from carma.monitor.nvml import NvmlSampler, load_nvml
from carma_lab.bench.machine import WANTS_A_GPU, Machine, facts
from carma_lab.bench.results_file import check_place, command_of, print_table, write

SAMPLE_HZ = 1.0
MEMORY_HZ = 5.0
PART = 3.0  # memory samples and the calls get this part of the time that samples get


class Options(Record, frozen=True, kw_only=True):
    """`json` is a file to write, or "-" for standard output instead of the table."""

    json: str | None = None
    seconds: float = 60.0
    gpus: int = 8


class Cost(Record, frozen=True, kw_only=True):
    """Cost of one kind of sample of all GPUs, `hz` times a second."""

    kind: str  # "sample" (all metrics) or "memory"
    hz: float
    rounds: int
    mean_ms: float  # processor time of the sampling thread, for each round
    p50_ms: float
    p95_ms: float
    core_percent: float
    process_percent: float  # the whole process, with its other threads and the benchmark itself


class CallCost(Record, frozen=True, kw_only=True):
    """Cost of one function of NVML, as often as samples at 1 Hz and memory samples at 5 Hz call it."""

    function: str
    kind: str
    calls_per_gpu: float  # for each sample
    mean_ms: float
    core_percent: float


class Report(Record, frozen=True, kw_only=True):
    """What the JSON file holds."""

    command: str
    gpus: int
    cards: tuple[str, ...]
    sources: tuple[str, ...]
    processes: int  # on the cards, each of which is listed in every sample
    driver: str
    nvidia_ml_py: str
    machine: Machine
    costs: tuple[Cost, ...]
    calls: tuple[CallCost, ...]


def run(options: Options, nvml: Any = None) -> int:
    """Measures, prints a table, writes the file. Raises NoGpus. `nvml` is pynvml, or a module like it."""
    check_place(options.json)
    if options.gpus < 1 or options.seconds <= 0:
        raise Usage("There is nothing to measure.", "Give at least one GPU and a time above zero.")
    try:
        report = measure(options, load_nvml() if nvml is None else nvml)
    except NoGpus as error:
        raise NoGpus(str(error), WANTS_A_GPU) from error
    _print(report, sys.stderr if options.json == "-" else sys.stdout)
    write(report, options.json)
    return 0


class SampleKind(NamedTuple):
    """One way to read all GPUs, `hz` times a second for `seconds`."""

    name: str
    hz: float
    seconds: float
    call: Callable[[NvmlSampler], object]


def measure(options: Options, nvml: Any) -> Report:
    machine = facts()
    meter = Meter(nvml)
    plain, metered = SamplerGroup(nvml, options.gpus), SamplerGroup(meter, options.gpus)
    part_s = options.seconds / PART
    kinds = (
        SampleKind("sample", SAMPLE_HZ, options.seconds, lambda sampler: sampler.sample(time.time())),
        SampleKind("memory", MEMORY_HZ, part_s, _sample_memory),
    )
    try:
        costs = tuple(plain.cost(kind) for kind in kinds)
        calls = tuple(call for kind in kinds for call in metered.calls(meter, kind._replace(seconds=part_s)))
        first = plain.samplers[0]
        return Report(
            command=command_of("sampler", options),
            gpus=options.gpus,
            cards=tuple(gpu.name for gpu in first.gpus()),
            sources=tuple(gpu.capabilities.source for gpu in first.gpus()),
            processes=sum(len(sample.processes or ()) for sample in first.sample(time.time())),
            driver=first.driver(),
            nvidia_ml_py=version("nvidia-ml-py"),
            machine=machine,
            costs=costs,
            calls=calls,
        )
    finally:
        plain.close()
        metered.close()


class Meter:
    """NVML with a stopwatch at every function: calls and processor seconds by name."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self.calls: dict[str, int] = defaultdict(int)
        self.spent_s: dict[str, float] = defaultdict(float)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._nvml, name)
        if not name.startswith("nvml") or not callable(found):
            return found

        def timed(*arguments: object) -> Any:
            began = time.thread_time()
            try:
                return found(*arguments)
            finally:
                self.calls[name] += 1
                self.spent_s[name] += time.thread_time() - began

        return timed

    def clear(self) -> None:
        self.calls.clear()
        self.spent_s.clear()


class SamplerGroup:
    """Enough samplers to read a GPU at least `gpus` times together."""

    def __init__(self, nvml: Any, gpus: int) -> None:
        self._gpus = gpus
        self._feed = DcgmThread()  # one for all, as a daemon has one
        self.samplers = [NvmlSampler(nvml, dcgm=self._feed)]
        while self._reads < gpus:
            self.samplers.append(NvmlSampler(nvml, dcgm=self._feed))

    @property
    def _reads(self) -> int:
        return sum(len(sampler.gpus()) for sampler in self.samplers)

    def cost(self, kind: SampleKind) -> Cost:
        self._round(kind)  # the first round asks what is cached afterwards; it is not counted
        began, used_s = time.monotonic(), _process_s()
        spans_s = self._pace(kind)
        process = (_process_s() - used_s) / (time.monotonic() - began)
        scale = self._gpus / self._reads
        spans_ms = [1000 * scale * span for span in spans_s]
        mean_ms = sum(spans_ms) / len(spans_ms)
        return Cost(
            kind=kind.name,
            hz=kind.hz,
            rounds=len(spans_ms),
            mean_ms=mean_ms,
            p50_ms=percentile(spans_ms, 50),
            p95_ms=percentile(spans_ms, 95),
            core_percent=100 * kind.hz * mean_ms / 1000,
            process_percent=100 * scale * process,
        )

    def calls(self, meter: Meter, kind: SampleKind) -> list[CallCost]:
        """The most expensive call first."""
        self._round(kind)
        meter.clear()
        samples = len(self._pace(kind)) * self._reads
        return [
            CallCost(
                function=function,
                kind=kind.name,
                calls_per_gpu=meter.calls[function] / samples,
                mean_ms=1000 * spent_s / meter.calls[function],
                core_percent=100 * kind.hz * self._gpus * spent_s / samples,
            )
            for function, spent_s in sorted(meter.spent_s.items(), key=lambda item: -item[1])
        ]

    def close(self) -> None:
        for sampler in self.samplers:
            sampler.close()

    def _pace(self, kind: SampleKind) -> list[float]:
        """Processor seconds of each round."""
        due = time.monotonic()
        spans: list[float] = []
        for _ in range(max(1, round(kind.seconds * kind.hz))):
            due += 1 / kind.hz
            time.sleep(max(0.0, due - time.monotonic()))
            spans.append(self._round(kind))
        return spans

    def _round(self, kind: SampleKind) -> float:
        began = time.thread_time()
        for sampler in self.samplers:
            kind.call(sampler)
        return time.thread_time() - began


def _sample_memory(sampler: NvmlSampler) -> None:
    sampler.sample_memory([gpu.id for gpu in sampler.gpus()], time.time())


def _process_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _print(report: Report, to: Any) -> None:
    print(f"{', '.join(report.cards)}; driver {report.driver}; activity from {', '.join(report.sources)}", file=to)
    print(f"As {report.gpus} GPUs would cost; {report.processes} processes on the cards", file=to)
    costs = [
        (c.kind, f"{c.hz:g}", f"{c.mean_ms:.2f}", f"{c.p95_ms:.2f}", f"{c.core_percent:.2f}") for c in report.costs
    ]
    print_table("", ("kind", "a second", "mean ms", "p95 ms", "% of a core"), costs, to)
    calls = [
        (c.function, c.kind, f"{c.calls_per_gpu:.2f}", f"{c.mean_ms:.3f}", f"{c.core_percent:.3f}")
        for c in report.calls
    ]
    print_table("", ("call", "kind", "a GPU's sample", "mean ms", "% of a core"), calls, to)
