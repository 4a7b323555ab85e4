"""Records runs of a private daemon and judges the simulator by them, for `fidelity_virtual`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from carma.errors import CarmaError
from carma.testing.private_daemon import PrivateDaemon
from carma.wire.api_types import SubmitRequest
from carma_lab.bench.machine import facts, task_spec
from carma_lab.cli.simulate_view import show
from carma_lab.runs.from_server import recorded
from carma_lab.runs.record import Run, read, write
from carma_lab.simulator.fidelity import Fidelity, compare_with_simulation, known_from
from carma_lab.simulator.fidelity_solo import Known

POLL_S = 0.5
REST_S = 4.0  # without tasks, to measure the idle power from which the energy of tasks is computed


class Job(NamedTuple):
    """A task to submit, `at_s` seconds of the daemon's clock after the start."""

    at_s: float
    name: str
    command: tuple[str, ...]
    memory_mib: int
    gpus: int = 1


def record(daemon: PrivateDaemon, jobs: Sequence[Job], limit_s: float, name: str) -> Run:
    """What has not ended after `limit_s` real seconds is cancelled."""

    def say(line: str) -> None:
        print(f"\r{name}: {line}", end="", file=sys.stderr, flush=True)

    client = daemon.client
    time.sleep(REST_S)
    server = client.server()
    began, start_at = time.monotonic(), server.now
    waiting, ids = sorted(jobs), list[int]()
    while True:
        elapsed_s = time.monotonic() - began
        while waiting and waiting[0].at_s <= elapsed_s * server.speed:
            ids += _submit(daemon, waiting.pop(0))
        daemon.check_alive()
        left = client.tasks(user="all")
        running = sum(task.state in ("starting", "running") for task in left)
        say(f"{elapsed_s:4.0f} s: {len(ids)} of {len(jobs)} submitted, {running} run, {len(ids) - len(left)} done")
        if not waiting and not left:
            break
        if elapsed_s > limit_s:
            _give_up(daemon, [task.id for task in left], say)
            break
        time.sleep(POLL_S)
    print(file=sys.stderr)
    return recorded(client, start_at - 1.0)


def _submit(daemon: PrivateDaemon, job: Job) -> tuple[int, ...]:
    spec = task_spec(daemon, *job.command, name=job.name, gpus=job.gpus, gpu_memory_mib=job.memory_mib)
    return daemon.client.submit(SubmitRequest(spec=spec)).ids


def _give_up(daemon: PrivateDaemon, left: Sequence[int], say: Callable[[str], None]) -> None:
    say(f"out of time: {len(left)} tasks are cancelled; they count with what they did")
    for task in left:
        daemon.client.cancel(task, reason="the recording is over")
    for task in left:
        daemon.client.wait(task, timeout_s=60.0)


def judge(run: Run, name: str, out: Path, known: Mapping[str, Known] | None = None) -> Fidelity | None:
    """Printed, and written beside the run; None if the run cannot be simulated."""
    try:
        found, _ = compare_with_simulation(run, known)
    except CarmaError as error:
        print(f"{name}: {error}. {error.hint}")
        return None
    show(name, found)
    print(flush=True)
    (out / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    return found


def judge_all(out: Path, runs: Mapping[str, Path]) -> None:
    """Each run by itself, and all but the first once more with the solo times from the first."""
    for name, path in runs.items():
        judge(read(path), f"fidelity-{name}", out)
    first, *others = runs
    known = known_from(runs[first])
    for name in others:
        judge(read(runs[name]), f"fidelity-{name}-solo", out, known)


def parser(description: str, option: str, runs: Iterable[str], tasks: int) -> argparse.ArgumentParser:
    """The options. `option` selects the runs."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--out", type=Path, required=True, help="directory of the runs and the judgements")
    help_runs = "names of runs, separated by commas; the first gives the solo times"
    made.add_argument(option, dest="runs", default=",".join(runs), help=f"{help_runs} (default: %(default)s)")
    made.add_argument("--tasks", type=int, default=tasks, help="number of tasks (default: %(default)s)")
    made.add_argument("--judge", action="store_true", help="record nothing; judge the recorded runs")
    return made


def files(asked: argparse.Namespace) -> dict[str, Path]:
    """The file of each run. Makes the directory."""
    asked.out.mkdir(parents=True, exist_ok=True)
    return {name: asked.out / f"run-{name}.json" for name in asked.runs.split(",")}


def keep(run: Run, path: Path) -> None:
    """The record without the course, which follows from the attempts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write(msgspec.structs.replace(run, course=()), path)


def write_about(out: Path, tool: str, more: Mapping[str, object]) -> None:
    """What the runs there were recorded on, and by which command."""
    words = " ".join(sys.argv[1:])
    about = {"command": f"python -m {tool} {words}".strip(), "machine": facts(), **more}
    (out / "about.json").write_bytes(msgspec.json.format(msgspec.json.encode(about), indent=1) + b"\n")
