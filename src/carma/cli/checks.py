"""What `carma doctor` looks at: each check is a function that returns a finding and never raises."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from carma import __version__
from carma.cli.wording import many
from carma.errors import CarmaError, Unreachable
from carma.wire.types import ServerView

Verdict = Literal["ok", "warn", "bad"]
LEAST_FREE_BYTES = 256 << 20
LITTLE_FREE_BYTES = 2 << 30
PATIENT_S = 10.0  # for the daemon's answer
ANSWER_S = 2.0  # where it is asked by the way


class Finding(msgspec.Struct, frozen=True):
    check: str
    verdict: Verdict
    text: str
    hint: str = ""


def python() -> Finding:
    version = ".".join(str(part) for part in sys.version_info[:3])
    good = sys.version_info >= (3, 11)
    return Finding("python", "ok" if good else "bad", f"{version} at {sys.executable}", "" if good else "3.11 or newer")


@cache
def _elsewhere() -> ServerView | None:
    """The daemon that serves this user, where it is somebody else's: what it keeps is then not the user's to write."""
    from carma.cli.connect import connect

    try:
        with connect(ANSWER_S) as client:
            server = client.server()
    except CarmaError:
        return None
    return server if os.geteuid() not in (0, server.uid) else None


def _nearest(directory: Path) -> Path:
    return next(path for path in (directory, *directory.parents) if os.path.exists(path))


def home() -> Finding:
    from carma.paths import find_paths

    if server := _elsewhere():
        return Finding("home", "ok", f"{server.home}, of the daemon that {server.user} runs")
    directory = find_paths(os.environ).state_dir
    nearest = _nearest(directory)
    if os.access(nearest, os.W_OK):
        return Finding("home", "ok", f"{directory}" + ("" if nearest == directory else " (made at the first start)"))
    hint = "set CARMA_HOME to a directory of yours"
    return Finding("home", "bad", f"{directory} cannot be written", hint)


def disk() -> Finding:
    from carma.paths import find_paths

    server = _elsewhere()
    nearest = _nearest(Path(server.home) if server else find_paths(os.environ).state_dir)
    free = shutil.disk_usage(nearest).free
    text = f"{free / 2**30:.1f} GiB free at {nearest}"
    if free < LEAST_FREE_BYTES:
        return Finding("disk", "bad", text, "submissions are refused when the disk is full; make room")
    return Finding("disk", "warn" if free < LITTLE_FREE_BYTES else "ok", text)


def settings() -> Finding:
    from carma.cli.config import check_names
    from carma.config import load_settings
    from carma.paths import find_paths

    if server := _elsewhere():
        return Finding("settings", "ok", f"those of the daemon that {server.user} runs: carma config show")
    paths = find_paths(os.environ)
    check_names(load_settings(paths, os.environ).settings)
    there = paths.config_file.is_file()
    return Finding("settings", "ok", f"{paths.config_file}" + ("" if there else " is not there; the defaults hold"))


def daemon() -> Finding:
    from carma.cli.connect import connect
    from carma.paths import find_socket
    from carma.transport import somebody_listens

    try:
        with connect(PATIENT_S) as client:
            server = client.server()
    except Unreachable as error:
        if somebody_listens(find_socket(os.environ)):
            return Finding("daemon", "bad", str(error), error.hint)
        return Finding("daemon", "warn", str(error), "start one: carma up")
    text = (
        f"version {server.version}, pid {server.pid}, policy {server.policy}, {many(server.gpus, 'GPU')}, "
        f"{server.running} running, {server.queued} waiting"
    )
    if server.version != __version__:
        return Finding("daemon", "warn", text, f"this command is {__version__}: carma down, then carma up")
    if server.drained is not None:
        return Finding("daemon", "warn", f"{text}; drained: {server.drained}", "carma resume")
    return Finding("daemon", "ok", text)


def gpus() -> Finding:
    from carma.errors import NoGpus
    from carma.monitor.nvml import open_nvml

    try:
        sampler = open_nvml()
    except NoGpus as error:
        virtual = _virtual_gpus()
        return Finding("gpus", "ok", virtual) if virtual else Finding("gpus", "warn", str(error), error.hint)
    try:
        found = sampler.gpus()
        text = ", ".join(f"{gpu.index}: {gpu.name} {gpu.memory_mib / 1024:.0f} GiB" for gpu in found)
        blind = [gpu.index for gpu in found if not gpu.capabilities.sm_active]
        problems = sampler.problems()
    finally:
        sampler.close()
    if problems:
        return Finding("gpus", "warn", f"{text}; {'; '.join(problems)}")
    if blind:
        hint = "SM activity needs Hopper or newer (GPM); without it set gate.enabled = false to share GPUs"
        return Finding("gpus", "warn", f"{text}; no SM activity on {blind}", hint)
    return Finding("gpus", "ok", f"{text}; activity from GPM")


def _virtual_gpus() -> str:
    """Those of the daemon, in words; nothing when there is no daemon, or when it has real ones."""
    from carma.cli.connect import connect

    try:
        with connect(ANSWER_S) as client:
            found = client.gpus()
    except CarmaError:
        return ""
    if not found or any(gpu.kind != "virtual" for gpu in found):
        return ""
    return f"the daemon has {len(found)} virtual; this machine has none that NVML knows"


def mps() -> Finding:
    found = shutil.which("nvidia-cuda-mps-control")
    if found:
        return Finding("mps", "ok", found)
    return Finding("mps", "warn", "nvidia-cuda-mps-control is not on PATH", "tasks share GPUs by time slices")


def cgroup() -> Finding:
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        return Finding("cgroup", "ok", "version 2")
    return Finding("cgroup", "warn", "no cgroup version 2", "a host out-of-memory kill is told from the signal alone")


CHECKS: tuple[Callable[[], Finding], ...] = (python, home, disk, settings, daemon, gpus, mps, cgroup)


def run_all() -> list[Finding]:
    _elsewhere.cache_clear()
    return [_safely(check) for check in CHECKS]


def _safely(check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except CarmaError as error:
        return Finding(check.__name__, "bad", str(error), error.hint)
    except Exception as error:  # a check that breaks is a finding too
        return Finding(check.__name__, "bad", f"{type(error).__name__}: {error}")
