"""Checks of sharing and limits: MPS, memory caps, cgroups, trial runs and permissions."""

from __future__ import annotations

import os
from pathlib import Path

from carma import cgroups
from carma.cli.checks.doctor_facts import DoctorFacts, Finding, Verdict
from carma.launch.attempt_cgroups import FIRST_DRIVER
from carma.launch.mps_control import CONTROL, PIPE_VARIABLE, find_program, runs
from carma.trial import kernel_limits

DEFAULT_PIPES = "/tmp/nvidia-mps"  # of MPS daemons and clients without CUDA_MPS_PIPE_DIRECTORY
MOUNTS = Path("/proc/self/mounts")
DEVICES = Path("/dev")


def mps(facts: DoctorFacts) -> Finding | None:
    program = find_program(os.environ)
    if facts.machine is None and program is None:
        return None
    mechanism = facts.setting("sharing.mechanism", "auto")
    if mechanism in ("timeslice", "mig"):
        return Finding("mps", "ok", f"not used: sharing.mechanism is {mechanism}")
    if program is None:
        required = mechanism == "mps"
        effect = "no task can start" if required else "tasks share GPUs in time slices, and small tasks gain less"
        hint = "it comes with the NVIDIA driver (compute utilities); a container needs it mounted"
        verdict: Verdict = "bad" if required else "warn"
        return Finding("mps", verdict, f"{CONTROL} is not installed: {effect}", hint, f"no MPS: {effect}")
    text = f"installed ({program}); CARMA starts one MPS daemon for each user, as that user, with the first task"
    place = os.environ.get(PIPE_VARIABLE, DEFAULT_PIPES)
    pid = running_daemon(place)
    if pid is None:
        return Finding("mps", "ok", text)
    text += f". Another MPS daemon is running (pid {pid}, {place}); CARMA starts its own beside it"
    hint = f"tasks under different MPS daemons take turns on a GPU; its owner stops it with: echo quit | {CONTROL}"
    return Finding("mps", "warn", text, hint)


def running_daemon(place: str) -> int | None:
    """The pid of the control daemon that listens in this directory, from its pid file."""
    try:
        pid = int(Path(place, f"{CONTROL}.pid").read_text(encoding="ascii").strip())
    except (OSError, ValueError):
        return None
    return pid if runs(pid, CONTROL) else None


def memory_limits(facts: DoctorFacts) -> Finding | None:
    """The limits that hold tasks to their bookings."""
    if not facts.virtual and not facts.found.gpus:
        return None
    watchdog = facts.setting("sharing.watchdog", True)
    if not facts.setting("sharing.caps", True):
        text = f"off (sharing.caps = false): {'only the watchdog' if watchdog else 'nothing'} enforces bookings"
        return Finding(
            "memory limits", "warn" if watchdog else "bad", text, "sharing.caps = true holds tasks to their bookings"
        )
    if facts.virtual:
        return Finding("memory limits", "ok", "a virtual GPU stops a task that exceeds its booking")
    uses_mps = facts.setting("sharing.mechanism", "auto") in ("auto", "mps") and find_program(os.environ)
    under_mps = uses_mps and any(gpu.kind == "card" for gpu in facts.found.gpus)
    text = "bookings are enforced by " + ("MPS's memory limit, then " if under_mps else "")
    text += "the limits of PyTorch, JAX, TensorFlow and CuPy"
    if watchdog:
        return Finding("memory limits", "ok", f"{text}, then the watchdog")
    return Finding(
        "memory limits", "warn", f"{text}; no watchdog", "sharing.watchdog = true stops tasks without a limit"
    )


def cgroup(facts: DoctorFacts) -> Finding:
    counted = cgroups.oom_kills() is not None
    kind = "version 2" if Path("/sys/fs/cgroup/cgroup.controllers").exists() else "no version 2"
    kills = f"host out-of-memory kills are {'' if counted else 'not '}counted"
    text = "; ".join(part for part in (kind, kills, _gpu_limits(facts)) if part)
    hint = "" if counted else "CARMA recognises an out-of-memory kill by the signal alone"
    return Finding("cgroup", "ok" if counted else "warn", text, hint)


def _gpu_limits(facts: DoctorFacts) -> str:
    """What the driver supports, from its version: a test would change a cgroup."""
    major = facts.machine.driver.partition(".")[0] if facts.machine is not None else ""
    if not major.isdigit():
        return ""
    if int(major) < FIRST_DRIVER:
        return f"cgroup limits on GPU memory need driver {FIRST_DRIVER} or newer (this is {major})"
    return "this driver supports cgroup limits on GPU memory"


def task_cgroups(facts: DoctorFacts) -> Finding | None:
    """Whether the daemon can give each attempt a cgroup."""
    if facts.foreign_server is not None:
        return None
    own = cgroups.OWN if facts.server is None else f"/proc/{facts.server.pid}/cgroup"
    found = cgroups.find(own=own, enable=False)
    if not isinstance(found, str):
        return Finding("task cgroups", "ok", f"each attempt gets a cgroup (version {found.version})")
    effect = "processes may stay if a task's runner is killed, and the driver cannot limit the task's GPU memory"
    return Finding("task cgroups", "warn", f"none: {effect}", found, f"no cgroup for each task: {effect}")


def trial_runs(facts: DoctorFacts) -> Finding | None:
    """The limits of trial runs that the kernel enforces."""
    is_used = "trace" in facts.setting("memory.sources", ["trace"])
    if facts.virtual or facts.foreign_server is not None or not is_used:
        return None
    found = kernel_limits.survey(os.environ, None if facts.server is None else facts.server.pid)
    if found.complete:
        by = "systemd (systemd-run --scope)" if found.groups is None else f"cgroups version {found.groups.version}"
        return Finding("trial runs", "ok", f"{by} limits the processes and the memory of trial runs")
    by = "RLIMIT_NPROC, except for tasks of root" if facts.runs_as_root else "RLIMIT_NPROC"
    if found.groups is not None and found.groups.limits_pids:
        by = f"cgroups version {found.groups.version}"
    text = f"{by} limits the processes of trial runs; their memory is only checked every 50 ms"
    gaps = "one that allocates quickly, or in buffers of the kernel,"
    limitation = f"no memory limit for trial runs: {gaps} can exceed memory.trial_memory_mib"
    return Finding("trial runs", "warn", text, found.problem, limitation)


def permissions(facts: DoctorFacts) -> Finding:
    """Rights that the daemon or its tasks lack."""
    closed = _closed_devices()
    if closed:
        text = f"this user cannot open {', '.join(closed)}, so no task of this user can use a GPU"
        hint = "an administrator adds the user to the files' group, or sets the driver option NVreg_DeviceFileMode"
        return Finding("permissions", "bad", text, hint)
    if facts.runs_as_root and facts.setting("launch.run_as_submitter", "auto") == "no":
        text = "the daemon runs as root, and launch.run_as_submitter = 'no': the tasks of all users run as root"
        return Finding("permissions", "bad", text, "launch.run_as_submitter = 'auto'")
    hidden = _hidepid()
    if hidden and not facts.runs_as_root:
        text = f"/proc hides the processes of other users (hidepid={hidden}): foreign work on a GPU has no name"
        return Finding("permissions", "warn", text, "a daemon that runs as root sees them")
    if facts.runs_as_root:
        return Finding("permissions", "ok", "root's daemon runs each task as its submitter")
    owner = "this user" if facts.foreign_server is None else facts.foreign_server.user
    return Finding("permissions", "ok", f"a daemon of {owner} serves only {owner}")


def _closed_devices() -> list[str]:
    wanted = [*sorted(DEVICES.glob("nvidia[0-9]*")), DEVICES / "nvidiactl", DEVICES / "nvidia-uvm"]
    return [str(path) for path in wanted if path.exists() and not os.access(path, os.R_OK | os.W_OK)]


def _hidepid() -> str:
    """The option of the mount at /proc; empty if nothing is hidden."""
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for words in (line.split() for line in lines):
        if len(words) >= 4 and words[1] == "/proc" and words[2] == "proc":
            options = dict(option.partition("=")[::2] for option in words[3].split(","))
            return options.get("hidepid", "").replace("0", "").replace("off", "")
    return ""
