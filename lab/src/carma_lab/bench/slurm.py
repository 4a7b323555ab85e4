"""A private Slurm for the side-by-side figures: munged, slurmctld and slurmd in a temporary directory.

Only where the distribution's packages are installed, and only as root (slurmd changes to the job's user). Nothing of
a Slurm that is set up on the machine is read or touched: own configuration, own ports, own key.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

from carma.testing.private_daemon import end, wait_until

BINARIES = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "sinfo")
START_LIMIT_S = 60.0

CONFIGURATION = Path(__file__).with_suffix(".conf")  # with places for format()
# By default slurmctld gathers ended and new batch jobs for three seconds before it schedules (batch_sched_delay).
PROMPT = "SchedulerParameters=batch_sched_delay=0,sched_min_interval=0"


def why_not() -> str:
    """The reason for not measuring Slurm here; empty when it can be."""
    missing = [binary for binary in BINARIES if _which(binary) is None]
    if missing:
        return f"no {', '.join(missing)} on the PATH (Debian: apt install slurmctld slurmd slurm-client munge)"
    return "" if os.geteuid() == 0 else "a private slurmd needs root"


def _which(binary: str) -> str | None:
    """Daemons live in sbin, which is often not on a user's PATH."""
    return shutil.which(binary, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


class PrivateSlurm:
    """A context manager; `submit` submits one no-op job, `all_ended` tells whether the queue is empty.

    `scheduler` is a line for its configuration: empty for Slurm's defaults, PROMPT for no delay.
    """

    def __init__(self, slots: int, scheduler: str = "") -> None:
        self._slots = slots
        self._scheduler = scheduler
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> PrivateSlurm:
        self.home = Path(tempfile.mkdtemp(prefix="carma-slurm-", dir="/tmp"))
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _start(self) -> None:
        host = socket.gethostname().partition(".")[0]
        self._write_files(host)
        self._env = {**os.environ, "SLURM_CONF": str(self.home / "slurm.conf")}
        key, sock = self.home / "munge.key", self.home / "munge.socket"
        self._spawn(
            *("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={sock}"),
            *(f"--pid-file={self.home}/munged.pid", f"--seed-file={self.home}/munged.seed"),
            *(f"--log-file={self.home}/munged.log",),
        )
        wait_until(sock.exists, START_LIMIT_S, "munged did not start")
        self._spawn("slurmctld", "-D", "-c")
        self._spawn("slurmd", "-D", "-N", host)
        wait_until(self._idle, START_LIMIT_S, "the private Slurm did not come up")

    def _write_files(self, host: str) -> None:
        self.home.chmod(0o755)  # the job's shell and munge's clients look in from outside
        for folder in ("state", "spool"):
            (self.home / folder).mkdir()
        key = self.home / "munge.key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o400)
        controller_port, node_port = free_ports(2)
        text = CONFIGURATION.read_text(encoding="utf-8").format(
            host=host,
            home=self.home,
            slots=self._slots,
            controller_port=controller_port,
            node_port=node_port,
            scheduler=self._scheduler,
        )
        (self.home / "slurm.conf").write_text(text)
        self.script = self.home / "job.sh"
        self.script.write_text("#!/bin/sh\ntrue\n")
        self.script.chmod(0o755)

    def _spawn(self, binary: str, *arguments: str) -> None:
        with (self.home / f"{binary}.out").open("wb") as output:
            self._daemons.append(
                subprocess.Popen(
                    [_which(binary) or binary, *arguments],
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _call(self, binary: str, *arguments: str) -> str:
        command = [_which(binary) or binary, *arguments]
        return subprocess.run(command, env=self._env, check=True, capture_output=True, text=True).stdout

    def _idle(self) -> bool:
        with contextlib.suppress(subprocess.CalledProcessError):
            return "idle" in self._call("sinfo", "-h", "-o", "%T")
        return False

    def submit(self) -> None:
        self._call("sbatch", "-Q", "-n", "1", "-D", str(self.home), "-o", "/dev/null", str(self.script))

    def all_ended(self) -> bool:
        return not self._call("squeue", "-h").strip()

    def close(self) -> None:
        for daemon in reversed(self._daemons):
            if daemon.poll() is None:
                daemon.terminate()
        for daemon in self._daemons:
            end(daemon)
        self._daemons.clear()
        shutil.rmtree(self.home, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    """Ports that are free at this moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
