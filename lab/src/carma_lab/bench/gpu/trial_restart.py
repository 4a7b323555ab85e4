"""The daemon is killed and started again while tasks train; then the MPS server is killed under the longer ones.

To be shown: the tasks go on while no daemon runs, are taken up with the pids that they had, end well and are on record
with memory and energy; the MPS control daemon outlives the killed daemon and is used again. Tasks whose MPS server is
gone are ended as disrupted, come back under a new one, and end well.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from carma.wire.api_types import TaskView
from carma_lab.bench.gpu.trial_server import NOT_VIRTUAL, Server, Stage, first, summary
from carma_lab.bench.gpu.trial_shapes import BY_WORKLOAD, training
from carma_lab.bench.gpu.trial_tasks import EXACT, IDLE_S

# Tasks and how often they make their usual steps: the short ones outlast the restart, the long ones the short ones.
SHORT = (("resnet18-cifar-b32", 0.9), ("lstm-512x2-b64", 0.8))
LONG = (("encoder-768x12-b16-bf16", 2.2), ("mobilenet-cifar-b64", 1.4))
AWAY_S = 2.0  # without a daemon
PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"


class MpsProcess(NamedTuple):
    pid: int
    kind: str  # control, server


def run(stage: Stage) -> dict[str, Any]:
    options = stage.options
    mechanism = "auto" if options.virtual else "mps"
    works = [
        training(BY_WORKLOAD[name], virtual=options.virtual, scale=times * options.scale)
        for name, times in (*SHORT, *LONG)
    ]
    names = [work.name for work in works]
    with Server(virtual=options.virtual, settings={**EXACT, "sharing": {"mechanism": mechanism}}) as server:
        time.sleep(IDLE_S * min(1.0, options.scale))
        ids = {work.name: server.submit(work) for work in works}
        server.wait_for_line(names, "steps", stage.until)
        before = {name: (server.show(task).attempts[-1].pid, _steps(server, name)) for name, task in ids.items()}
        mps_before = _mps(server, names)
        killed_at, back_at = _restart(stage, server)
        found: dict[str, Any] = {"daemon": _adopted(server, ids, before, mps_before) | {"away_s": back_at - killed_at}}
        stage.say(f"the daemon is back after {back_at - killed_at:.1f} s; waiting for the shorter tasks")
        server.wait([ids[name] for name, _ in SHORT], stage.until)
        found["mps"] = _kill_mps(stage, server, ids)
        found["everything_ended"] = server.wait(list(ids.values()), stage.until)
        found["tasks"] = [summary(server.show(task)) for task in ids.values()]
    return found


def shortfalls(found: dict[str, Any]) -> list[str]:
    short = [
        f"restart: {row['name']} was not taken up as it was" for row in found["daemon"]["tasks"] if not row["kept"]
    ]
    if found["daemon"]["mps_control_kept"] is False:
        short.append("restart: the MPS control daemon did not outlive the daemon")
    for row in found["tasks"]:
        if row["outcome"] != "succeeded":
            short.append(f"restart: {row['name']} ended as {row['outcome']}")
        elif row["attempts"][-1]["observed_mib"] is None or row["attempts"][-1]["energy_j"] is None:
            short.append(f"restart: {row['name']} is on record without memory or energy")
    if found["mps"].get("skipped", NOT_VIRTUAL) != NOT_VIRTUAL:
        short.append(f"restart: the MPS server was not killed: {found['mps']['skipped']}")
    disturbed = {name for name, _ in LONG} if "killed" in found["mps"] else set()
    for row in found["tasks"]:
        kinds = [(attempt["outcome"] or {}).get("kind") for attempt in row["attempts"]]
        expected = ["disrupted", "succeeded"] if row["name"] in disturbed else ["succeeded"]
        if kinds != expected and row["outcome"] == "succeeded":
            short.append(f"restart: {row['name']} went through {', '.join(map(str, kinds))}")
    return short


def mps_of(pipe: str) -> tuple[MpsProcess, ...]:
    """The MPS processes of that pipe directory: the control daemon, and the servers that it started."""
    found: list[MpsProcess] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            name = (entry / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace").rpartition("/")[2]
            if name.startswith("nvidia-cuda-mps-") and _environ(int(entry.name)).get(PIPE_VARIABLE) == pipe:
                found.append(MpsProcess(int(entry.name), name.removeprefix("nvidia-cuda-mps-").split()[0]))
    return tuple(sorted(found))


def _environ(pid: int) -> dict[str, str]:
    """Environment of a process; empty if the process is gone or belongs to another user."""
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(pair.decode(errors="replace").split("=", 1) for pair in pairs if b"=" in pair)


def _mps(server: Server, names: Sequence[str]) -> tuple[MpsProcess, ...]:
    """Finds the processes through the environment of the tasks, independently of CARMA's records."""
    pipes: set[str] = set()
    for name in names:
        started = first(server.log(name), "started")
        pipe = _environ(started["pid"]).get(PIPE_VARIABLE) if started is not None else None
        if pipe is not None:
            pipes.add(pipe)
    return tuple(process for pipe in sorted(pipes) for process in mps_of(pipe))


def _steps(server: Server, name: str) -> int:
    return max((line["steps"] for line in server.log(name) if "steps" in line), default=0)


def _restart(stage: Stage, server: Server) -> tuple[float, float]:
    stage.say("the daemon is killed")
    killed_at = time.time()
    server.kill()
    time.sleep(AWAY_S * min(1.0, stage.options.scale))
    server.start()
    return killed_at, time.time()


def _adopted(
    server: Server, ids: dict[str, int], before: dict[str, tuple[int | None, int]], mps: Sequence[MpsProcess]
) -> dict[str, Any]:
    """`before`: pid and steps of each task, and `mps` the MPS processes, when the daemon was killed."""
    rows = []
    for name, (pid, steps) in before.items():
        view = server.show(ids[name])
        rows.append(
            {
                "name": name,
                "state_after": view.state,
                "pid_before": pid,
                "pid_after": view.attempts[-1].pid,
                "steps_before": steps,
                "steps_after": _steps(server, name),
                "attempts": len(view.attempts),
                "kept": _kept(view, pid),
            }
        )
    control = {process.pid for process in mps if process.kind == "control"}
    there = {process.pid for process in _mps(server, list(ids))}
    return {
        "tasks": rows,
        "mps_before": [process._asdict() for process in mps],
        "mps_control_kept": control <= there if control else None,
    }


def _kept(view: TaskView, pid: int | None) -> bool:
    """Whether it is still the same process, or ended successfully meanwhile."""
    same = len(view.attempts) == 1 and view.attempts[-1].pid == pid
    return same and (view.state == "running" or (view.outcome or {}).get("kind") == "succeeded")


def _kill_mps(stage: Stage, server: Server, ids: dict[str, int]) -> dict[str, Any]:
    """SIGKILL to the MPS servers, not to the control daemon. Tells how long it took until their tasks were ended."""
    names = [name for name, _ in LONG]
    if stage.options.virtual:
        return {"skipped": NOT_VIRTUAL}
    servers = [process for process in _mps(server, names) if process.kind == "server"]
    if not servers:
        notes = {server.show(ids[name]).attempts[-1].note for name in names}
        return {"skipped": f"no MPS server serves the tasks: {'; '.join(sorted(notes)) or 'no reason is on record'}"}
    stage.say("the MPS server is killed")
    killed_at = time.time()
    for process in servers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    server.wait([ids[name] for name in names], stage.until)
    ends = {name: server.show(ids[name]).attempts[0] for name in names}
    return {
        "killed": [process._asdict() for process in servers],
        "tasks": [
            {
                "name": name,
                "ended_after_s": None if attempt.ended_at is None else attempt.ended_at - killed_at,
                "outcome": attempt.outcome,
            }
            for name, attempt in ends.items()
        ],
    }
