"""Checks of how tasks share GPUs and what limits them and their trial runs: MPS, caps, cgroups, permissions.

Nothing is started or changed.
"""

from __future__ import annotations

import os
from pathlib import Path

from carma.cli.checks.machine_facts import Finding, Look, Verdict
from carma.launch.mps_control import CONTROL, PIPE_VARIABLE, find_program, runs

DEFAULT_PIPES = "/tmp/nvidia-mps"  # where a daemon listens, and clients look, unless told otherwise
MOUNTS = Path("/proc/self/mounts")
DEVICES = Path("/dev")


def mps(look: Look) -> Finding | None:
    program = find_program(os.environ)
    if look.machine is None and program is None:
        return None
    mechanism = look.setting("sharing.mechanism", "auto")
    if mechanism in ("timeslice", "mig"):
        return Finding("mps", "ok", f"not used: sharing.mechanism is {mechanism}")
    if program is None:
        verdict: Verdict = "bad" if mechanism == "mps" else "warn"
        falls = (
            "no task can start" if mechanism == "mps" else "tasks share GPUs in time slices, and small ones gain less"
        )
        hint = "it comes with the NVIDIA driver (its compute utilities); in a container it has to be mounted"
        return Finding("mps", verdict, f"{CONTROL} is not installed: {falls}", hint, f"no MPS: {falls}")
    text = f"the program is there ({program}); it is started for each user, as that user, with their first task"
    place = os.environ.get(PIPE_VARIABLE, DEFAULT_PIPES)
    pid = running_daemon(place)
    if pid is None:
        return Finding("mps", "ok", text)
    text += f". Another MPS daemon runs already (pid {pid}, {place}); CARMA's own stand beside it"
    hint = f"work under the two takes turns on a GPU; whoever started it ends it with: echo quit | {CONTROL}"
    return Finding("mps", "warn", text, hint)


def running_daemon(place: str) -> int | None:
    """The control daemon that listens there, by the pid that it leaves there."""
    try:
        pid = int(Path(place, f"{CONTROL}.pid").read_text(encoding="ascii").strip())
    except (OSError, ValueError):
        return None
    return pid if runs(pid, CONTROL) else None


def caps(look: Look) -> Finding | None:
    """Which rungs keep tasks within their bookings here."""
    if not look.virtual and not look.found.gpus:
        return None
    watchdog = "the watchdog" if look.setting("sharing.watchdog", True) else ""
    if not look.setting("sharing.caps", True):
        text = f"off (sharing.caps = false): {watchdog or 'nothing'} keeps a task from its neighbours' memory"
        return Finding("caps", "warn" if watchdog else "bad", text, "sharing.caps = true holds tasks to their bookings")
    if look.virtual:
        return Finding("caps", "ok", "virtual GPUs stop a task at its cap themselves")
    uses_mps = look.setting("sharing.mechanism", "auto") in ("auto", "mps") and find_program(os.environ)
    whole_cards = any(gpu.kind == "card" for gpu in look.found.gpus)
    rungs = [
        "MPS's memory limit" if uses_mps and whole_cards else "",
        "the limits of PyTorch, JAX, TensorFlow and CuPy themselves",
    ]
    text = "tasks are held by " + ", then ".join(rung for rung in rungs if rung)
    if watchdog:
        return Finding("caps", "ok", f"{text}; {watchdog} behind them")
    return Finding("caps", "warn", f"{text}; no watchdog", "sharing.watchdog = true catches those that no limit holds")


def cgroup(look: Look) -> Finding:
    from carma.cgroups import oom_kills

    counted = oom_kills() is not None
    kind = "version 2" if Path("/sys/fs/cgroup/cgroup.controllers").exists() else "no version 2"
    told = "out-of-memory kills of the host are counted" if counted else "out-of-memory kills are not counted"
    text = "; ".join(part for part in (kind, told, _gpu_limits(look)) if part)
    hint = "" if counted else "a kill for want of host memory is told from the signal alone"
    return Finding("cgroup", "ok" if counted else "warn", text, hint)


def _gpu_limits(look: Look) -> str:
    """What the driver could do; nothing is tried, because even that would change a cgroup."""
    from carma.launch.attempt_cgroups import FIRST_DRIVER

    major = look.machine.driver.partition(".")[0] if look.machine is not None else ""
    if not major.isdigit():
        return ""
    if int(major) < FIRST_DRIVER:
        return f"the GPU memory of a cgroup is limited by drivers from {FIRST_DRIVER} on (this is {major})"
    return "this driver can limit the GPU memory of a cgroup"


def task_cgroups(look: Look) -> Finding | None:
    """Whether the daemon can give each attempt a cgroup."""
    from carma import cgroups

    if look.elsewhere is not None:
        return None
    own = cgroups.OWN if look.server is None else f"/proc/{look.server.pid}/cgroup"
    found = cgroups.find(own=own, enable=False)
    if not isinstance(found, str):
        return Finding("task cgroups", "ok", f"each attempt gets a cgroup (version {found.version})")
    lost = "processes may stay if a task's runner is killed, and the driver cannot limit the task's GPU memory"
    return Finding("task cgroups", "warn", f"none: {lost}", found, f"no cgroup for each task: {lost}")


def trials(look: Look) -> Finding | None:
    """Which limits of a trial run the kernel enforces."""
    from carma.trial.confinement import survey

    if look.virtual or look.elsewhere is not None or "trace" not in look.setting("memory.sources", ["trace"]):
        return None
    server = look.server
    found = survey(os.environ, None if server is None else server.pid)
    if found.complete:
        by = "systemd (systemd-run --scope)" if found.groups is None else f"cgroups version {found.groups.version}"
        return Finding("trials", "ok", f"processes and memory of trial runs are limited by {by}")
    as_root = (os.geteuid() if server is None else server.uid) == 0
    counted = "RLIMIT_NPROC, except for tasks of root" if as_root else "RLIMIT_NPROC"
    if found.groups is not None and found.groups.limits_pids:
        counted = f"cgroups version {found.groups.version}"
    text = f"trial runs: processes are limited by {counted}; memory is only checked every 50 ms"
    limitation = "no memory limit for trial runs: one that allocates quickly can exceed memory.trial_memory_mib"
    return Finding("trials", "warn", text, found.problem, limitation)


def permissions(look: Look) -> Finding:
    """What the daemon, or a task, would be kept from."""
    shut = _closed_devices()
    if shut:
        text = f"{', '.join(shut)}: not to be opened by this user, so no task of theirs can use a GPU"
        hint = "an administrator adds the user to the files' group, or sets the driver option NVreg_DeviceFileMode"
        return Finding("permissions", "bad", text, hint)
    server = look.server
    as_root = (os.geteuid() if server is None else server.uid) == 0  # the daemon, or one that were started now
    if as_root and look.setting("launch.run_as_submitter", "auto") == "no":
        text = "the daemon runs as root, and launch.run_as_submitter = 'no': everybody's tasks run as root"
        return Finding("permissions", "bad", text, "launch.run_as_submitter = 'auto'")
    hidden = _hidepid()
    if hidden and not as_root:
        text = (
            f"/proc hides other users' processes (hidepid={hidden}): foreign work on a GPU is counted without its name"
        )
        return Finding("permissions", "warn", text, "a daemon that runs as root sees them")
    if as_root:
        daemon = "" if look.elsewhere is None else "the daemon is root's: "
        return Finding("permissions", "ok", f"{daemon}tasks run as whoever submitted them")
    whose = "this user" if look.elsewhere is None else look.elsewhere.user
    return Finding("permissions", "ok", f"a daemon of {whose} serves them alone")


def _closed_devices() -> list[str]:
    wanted = [*sorted(DEVICES.glob("nvidia[0-9]*")), DEVICES / "nvidiactl", DEVICES / "nvidia-uvm"]
    return [str(path) for path in wanted if path.exists() and not os.access(path, os.R_OK | os.W_OK)]


def _hidepid() -> str:
    """The option of the mount at /proc; empty where nothing is hidden."""
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for words in (line.split() for line in lines):
        if len(words) >= 4 and words[1] == "/proc" and words[2] == "proc":
            options = dict(option.partition("=")[::2] for option in words[3].split(","))
            return options.get("hidepid", "").replace("0", "").replace("off", "")
    return ""
