"""`carma bench daemon`: the daemon's own figures. It measures and prints; it never passes or fails.

Every part runs on private daemons with virtual GPUs at real speed. `--quick` does the same with fewer repeats.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from carma.core.model.values import Record, TaskSpec
from carma.demo.figures import percentile
from carma.testing.private_daemon import PrivateDaemon, PrivateSettings, wait_until
from carma.wire.api_types import SubmitRequest
from carma_lab.bench import decisions, peers, submissions
from carma_lab.bench.machine import cpu_s, task_spec, time_ms
from carma_lab.bench.results_file import Figure, FigureLog, percentiles

RUNNING = 100
PER_GPU = 4


def submit_to_running(count: int) -> Iterator[Figure]:
    """One task after the other on an idle server, by the daemon's own times."""
    spans_ms = []
    with PrivateDaemon(PrivateSettings(policy="exclusive")) as daemon:
        spec = task_spec(daemon, "true", gpu_memory_mib=1024)
        for _ in range(count):
            task = daemon.client.submit(SubmitRequest(spec=spec)).ids[0]
            view = daemon.client.wait(task, 60.0)
            if view.started_at is not None:
                spans_ms.append(1000 * (view.started_at - view.submitted_at))
    how = f"{count} tasks of `true`, one after the other, idle server, from acceptance to the process's start"
    yield from percentiles("start", spans_ms, how)


def cpu(span_s: float) -> Iterator[Figure]:
    """Share of one core that the daemon takes, idle and with 100 virtual tasks; the default sampling period."""
    with PrivateDaemon(PrivateSettings(gpus=4)) as daemon:
        yield _share("cpu.at_rest", daemon, span_s, "4 virtual GPUs, nothing queued or running")
    with PrivateDaemon(_crowded()) as daemon:
        task = SubmitRequest(spec=_long_task(daemon))
        for _ in range(RUNNING):
            daemon.client.submit(task)
        wait_until(
            lambda: len(daemon.client.tasks(state="running")) == RUNNING, 300.0, f"{RUNNING} tasks did not all start"
        )
        yield _share("cpu.with_100_running", daemon, span_s, f"{RUNNING} virtual tasks on {RUNNING // PER_GPU} GPUs")


def _crowded() -> PrivateSettings:
    """Gate and warm-up would spread a hundred starts over minutes; they cost the same when they let a task through."""
    settings: dict[str, dict[str, object]] = {"gate": {"enabled": False}, "warmup": {"enabled": False}}
    return PrivateSettings(gpus=RUNNING // PER_GPU, settings=settings)


def _long_task(daemon: PrivateDaemon) -> TaskSpec:
    shown = ("--memory-mib", "2048", "--sm", "0.1", "--dram", "0.05", "--seconds", "100000")
    return task_spec(daemon, sys.executable, "-m", "carma.vgpu.virtual_task", *shown, gpu_memory_mib=2048)


def _share(name: str, daemon: PrivateDaemon, span_s: float, what: str) -> Figure:
    time.sleep(2.0)  # past what starting up costs
    before_s, began = cpu_s(daemon.pid), time.perf_counter()
    time.sleep(span_s)
    used_s, took_s = cpu_s(daemon.pid) - before_s, time.perf_counter() - began
    how = f"{what}; processor time of the daemon over {span_s:g} s"
    return Figure(name=name, value=100 * used_s / took_s, unit="% of a core", how=how)


def help_time(count: int) -> Iterator[Figure]:
    """`carma --help` as a shell runs it."""
    command = [sys.executable, "-m", "carma", "--help"]
    spans_ms = [time_ms(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)) for _ in range(count)]
    how = f"carma --help, {count} times, the interpreter's own start included"
    yield Figure(name="help.p50", value=percentile(spans_ms, 50), unit="ms", how=how)
    yield Figure(name="help.best", value=min(spans_ms), unit="ms", how=how)


class Options(Record, frozen=True, kw_only=True):
    """`json` is a file to write, or "-" for standard output instead of the table."""

    json: str | None = None
    quick: bool = False


def run(options: Options) -> int:
    """Measures everything, prints each figure as it comes, writes the file. The exit code is 0."""
    log = FigureLog(options.json)
    skipped: list[str] = []

    def skip(reason: str) -> None:
        skipped.append(reason)
        log.say(reason)

    for figure in _measure(options.quick, skip):
        log.add(figure)
    log.write("daemon", options, quick=options.quick, skipped=skipped)
    return 0


def _measure(quick: bool, skip: Callable[[str], None]) -> Iterator[Figure]:
    yield from help_time(5 if quick else 20)
    yield from decisions.measure(5 if quick else 50)
    yield from submissions.measure(50 if quick else 500)
    yield from submit_to_running(10 if quick else 100)
    yield from cpu(4.0 if quick else 30.0)
    yield from peers.measure(20 if quick else 200, skip, defaults_too=not quick)
