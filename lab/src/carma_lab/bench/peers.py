"""The same no-op jobs through CARMA, task-spooler and Slurm, each in an instance of our own.

What is compared is the way of a job through the queue, as a user at a shell meets it: how long a submission takes,
and when the last job has ended. None of them does the same work: task-spooler keeps its queue in memory and has one
user, Slurm starts each job through three daemons, CARMA commits each submission to disk and decides by GPU.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

from carma.demo.figures import percentile
from carma.testing.private_daemon import PrivateDaemon, PrivateSettings, wait_until
from carma.wire.api_types import SubmitRequest
from carma_lab.bench.machine import task_spec, time_ms
from carma_lab.bench.results_file import Figure
from carma_lab.bench.slurm import PROMPT, PrivateSlurm, why_not

SLOTS = 4
LIMIT_S = 600.0
Say = Callable[[str], None]


def measure(jobs: int, say: Say, *, defaults_too: bool = True) -> Iterator[Figure]:
    """Each system that is installed; a printed reason for each that is not."""
    yield from _carma(jobs)
    tsp = shutil.which("tsp")
    if tsp is not None:
        with tempfile.TemporaryDirectory(prefix="carma-tsp-", dir="/tmp", ignore_cleanup_errors=True) as home:
            yield from _task_spooler(tsp, jobs, home)
    else:
        say("task-spooler: skipped, no tsp on the PATH (Debian: apt install task-spooler)")
    reason = why_not()
    if reason:
        say(f"Slurm: skipped, {reason}")
        return
    with PrivateSlurm(SLOTS, PROMPT) as slurm:
        yield from _figures("slurm_prompt", f"sbatch, {PROMPT}", jobs, slurm.submit, slurm.all_ended)
    if defaults_too:
        with PrivateSlurm(SLOTS) as slurm:
            yield from _figures("slurm", "sbatch, default scheduling delay", jobs, slurm.submit, slurm.all_ended)


def _figures(
    name: str, verb: str, jobs: int, submit: Callable[[], object], all_ended: Callable[[], bool]
) -> Iterator[Figure]:
    began = time.perf_counter()
    latencies_ms = [time_ms(submit) for _ in range(jobs)]
    wait_until(all_ended, LIMIT_S, f"{name}: the {jobs} jobs did not end within {LIMIT_S:g} s")
    total_s = time.perf_counter() - began
    how = f"{jobs} jobs of `true`, one after the other, {verb}, {SLOTS} at once"
    yield Figure(name=f"peers.{name}.submit_p50", value=percentile(latencies_ms, 50), unit="ms", how=how)
    yield Figure(name=f"peers.{name}.submit_p99", value=percentile(latencies_ms, 99), unit="ms", how=how)
    yield Figure(name=f"peers.{name}.all_done", value=total_s, unit="s", how=how + ", until the last has ended")


def _carma(jobs: int) -> Iterator[Figure]:
    true = shutil.which("true") or "/bin/true"
    settings = PrivateSettings(policy="exclusive", gpus=SLOTS)
    with PrivateDaemon(settings) as daemon:
        request = SubmitRequest(spec=task_spec(daemon, true))

        def ended() -> bool:
            return not daemon.client.tasks()

        yield from _figures("carma_library", "carma.client", jobs, lambda: daemon.client.submit(request), ended)
        command = [sys.executable, "-m", "carma", "submit", "--parsable", "--", true]

        def submit() -> None:
            subprocess.run(command, env=daemon.environment, cwd=daemon.work, check=True, stdout=subprocess.DEVNULL)

        yield from _figures("carma_cli", "carma submit", jobs, submit, ended)


def _task_spooler(tsp: str, jobs: int, home: str) -> Iterator[Figure]:
    env = {**os.environ, "TS_SOCKET": f"{home}/tsp.sock", "TMPDIR": home, "TS_MAXFINISHED": str(2 * jobs)}

    def call(*arguments: str) -> str:
        return subprocess.run([tsp, *arguments], env=env, check=True, capture_output=True, text=True).stdout

    def ended() -> bool:
        return not any(state in call("-l") for state in ("running", "queued"))

    try:
        call("-S", str(SLOTS))
        yield from _figures("task_spooler", "tsp -n", jobs, lambda: call("-n", "true"), ended)
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            call("-K")
