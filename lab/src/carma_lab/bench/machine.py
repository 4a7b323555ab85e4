"""What a figure was measured on. A figure without it means nothing."""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path

import msgspec

from carma import __version__
from carma.core.model.values import Record
from carma.errors import Usage
from gpumemnet.directories import write_whole

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


class Figure(Record, frozen=True, kw_only=True):
    """One measured number; `how` says what was done to get it."""

    name: str
    value: float
    unit: str
    how: str


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


class FigureLog:
    """Collects figures and prints each as it comes: on standard output, or on standard error where `out` is "-"."""

    def __init__(self, out: str | None) -> None:
        if out not in (None, "-") and not Path(str(out)).absolute().parent.is_dir():
            raise Usage(f"{out}: its directory does not exist")
        self.machine = facts()
        self.figures: list[Figure] = []
        self._stream = sys.stderr if out == "-" else sys.stdout
        self.say(headline(self.machine))

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def add(self, figure: Figure) -> None:
        self.figures.append(figure)
        self.say(f"  {figure.name:<34} {show(figure.value):>9} {figure.unit:<12} {figure.how}")


def headline(machine: Machine) -> str:
    return (
        f"{machine.cores} cores of {machine.cpu}, {machine.memory_gib:g} GiB, {machine.kernel}, "
        f"Python {machine.python}, CARMA {machine.carma}, {machine.date}, load {machine.load_before:g}"
    )


def show(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def write(report: msgspec.Struct, where: str | None) -> None:
    """A bench's figures as JSON: into a file, to standard output for `-`, nowhere for None."""
    if where is None:
        return
    text = msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n"
    path = Path(where)
    if where == "-":
        sys.stdout.write(text)
    elif path.is_symlink() or (path.exists() and not path.is_file()):  # a pipe: nothing may take its place
        path.write_text(text)
    else:
        write_whole(path, text.encode())
