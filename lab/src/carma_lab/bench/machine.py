"""The machine and the versions under which a figure was measured, and timers."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from carma import __version__
from carma.core.model.values import Record, TaskSpec
from carma.testing.private_daemon import PrivateDaemon

WANTS_A_GPU = "This measures a real NVIDIA GPU: run it where one is, with its driver."  # the hint where there is none


class Machine(Record, frozen=True, kw_only=True):
    cores: int  # those that this process may use
    cpu: str
    memory_gib: float
    kernel: str
    python: str
    carma: str
    date: str
    load_before: float  # the one-minute load when the benchmark began: above 0.5, read the figures with care


def facts() -> Machine:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        cpu=_cpu(),
        memory_gib=round(pages / 2**30, 1),
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        carma=__version__,
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        load_before=round(os.getloadavg()[0], 2),
    )


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpu_s(pid: int) -> float:
    """Processor seconds that a process has used, all threads. Not its children: a runner's time holds its task's."""
    text = Path(f"/proc/{pid}/stat").read_text()
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces
    return sum(int(field) for field in fields[11:13]) / os.sysconf("SC_CLK_TCK")


def headline(machine: Machine) -> str:
    return (
        f"{machine.cores} cores of {machine.cpu}, {machine.memory_gib:g} GiB, {machine.kernel}, "
        f"Python {machine.python}, CARMA {machine.carma}, {machine.date}, load {machine.load_before:g}"
    )


def time_ms(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    began_s = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - began_s)


def task_spec(daemon: PrivateDaemon, *command: str, **more: Any) -> TaskSpec:
    """A task that runs in the work directory of a private daemon, with its environment."""
    return TaskSpec(command=command, directory=str(daemon.work), environment=daemon.environment, **more)
