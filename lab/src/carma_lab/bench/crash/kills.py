"""Signals at random moments: to the daemon, to runners, to commands, and to several of them at once.

The moments and the kinds are drawn from a seed. What the machine does in between is not, so a second run has the same
kills and may have other results.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from carma import procfs
from carma.client import Client
from carma.errors import CarmaError, NotFound
from carma.procfs import Process
from carma.testing.private_daemon import wait_until
from carma_lab.bench.crash.server import LIMIT_S, CrashServer, LivingAttempt

DAEMON = {
    "daemon": (40, "SIGKILL, half of them while it starts"),
    "daemon_stop_continue": (5, "SIGSTOP, then SIGCONT"),
    "daemon_stop_kill": (10, "SIGSTOP, then SIGKILL"),
}
# How often each kind is drawn, and what is done. Only a restore does what has the weight 0.
KINDS = {
    **DAEMON,
    "daemon_database_replaced": (0, "SIGKILL, then a copy of the database in its place"),
    "runner": (10, "SIGKILL"),
    "runner_stop_continue": (4, "SIGSTOP, then SIGCONT"),
    "runner_stop_kill": (4, "SIGSTOP, then SIGKILL"),
    "command": (8, "SIGKILL"),
    "command_stop_continue": (4, "SIGSTOP, then SIGCONT"),
    "command_stop_kill": (3, "SIGSTOP, then SIGKILL"),
    "runner_and_command": (8, "SIGKILL to both"),
    "daemon_runner_and_command": (4, "SIGKILL to all three"),
}
ALL = {kind: weight for kind, (weight, _) in KINDS.items() if weight}
MISSED = "missed"  # the process had ended before the signal
STOPPED_LIMIT_S = 0.4
VICTIM_LIMIT_S = 20.0
END_LIMIT_S = 60.0
COLD_EVERY = 25  # every 25th start runs `carma up`, with all imports


class Killer:
    """Draws a kind and carries it out. `hit`: tasks whose runner or command was killed."""

    def __init__(self, server: CrashServer, seed: int, weights: dict[str, int], answers: Callable[[], int]) -> None:
        self.counts: Counter[str] = Counter()
        self.hit: set[int] = set()
        self.restart_s: list[float] = []  # from the start of a daemon to its first answer
        self.cold_restart_s: list[float] = []
        self.ended_s: list[float] = []  # from a kill of the command to the end of its task
        self.errors: list[str] = []
        self._server = server
        self._random = random.Random(seed)
        self._weights = weights
        self._answers = answers
        self._starts = 0

    @property
    def done(self) -> int:
        """Kills that reached their process."""
        return sum(count for kind, count in self.counts.items() if kind != MISSED)

    def strike(self) -> None:
        kind = self._random.choices(list(self._weights), list(self._weights.values()))[0]
        time.sleep(self._random.uniform(0.0, 0.05))
        if kind in DAEMON:
            self._strike_daemon(kind)
        else:
            self._strike_attempt(kind)

    # The daemon.

    def serve(self) -> None:
        """A daemon that answers."""
        cold = self._starts % COLD_EVERY == COLD_EVERY - 1
        began_s = time.monotonic()
        started = self._start(cold)
        self._server.wait_until_serving()
        if started:
            (self.cold_restart_s if cold else self.restart_s).append(time.monotonic() - began_s)

    def _start(self, cold: bool = False) -> bool:
        if self._server.pid is not None:
            return False
        self._server.start(cold=cold)
        self._starts += 1
        return True

    def _strike_daemon(self, kind: str) -> None:
        """Half of the plain kills come while it starts, the others after its first answer to the client."""
        if kind == "daemon" and self._server.pid is None and self._random.random() < 0.5:
            self._start()
            time.sleep(self._random.uniform(0.0, 0.12))
        else:
            before = self._answers()
            self.serve()
            wait_until(lambda: self._answers() > before, LIMIT_S, f"the client was not answered within {LIMIT_S:g} s")
            time.sleep(self._random.uniform(0.0, 0.08))
        if kind != "daemon":
            self._server.signal(signal.SIGSTOP)
            time.sleep(self._random.uniform(0.0, STOPPED_LIMIT_S))
        if kind == "daemon_stop_continue":
            self._server.signal(signal.SIGCONT)
        else:
            self._server.kill()
        self.counts[kind] += 1

    def replace_database(self, copy: Path) -> None:
        """Ends the daemon and puts a copy of the database in the place of the original, as documented."""
        self.serve()
        self._server.kill()
        database = self._server.paths.database
        for suffix in ("-wal", "-shm", ""):
            database.with_name(database.name + suffix).unlink(missing_ok=True)
        for file in copy.iterdir():
            file.rename(database.with_name(file.name))
        self.counts["daemon_database_replaced"] += 1

    # Attempts.

    def _strike_attempt(self, kind: str) -> None:
        if self._server.pid is None and self._random.random() < 0.5:
            self.serve()
        wants_runner, wants_command = "runner" in kind, "command" in kind
        victim = self._victim(
            lambda one: bool(one.runner or not wants_runner) and bool(one.command or not wants_command)
        )
        if victim is None:
            self.errors.append(f"no attempt to strike ({kind}) within {VICTIM_LIMIT_S:g} s")
            return
        processes = [*((victim.runner,) if wants_runner else ()), *(victim.command[:1] if wants_command else ())]
        self._signal([process for process in processes if process is not None], kind, victim)

    def _victim(self, fits: Callable[[LivingAttempt], bool]) -> LivingAttempt | None:
        """Half of the time the youngest, to meet it while it starts."""
        deadline_s = time.monotonic() + VICTIM_LIMIT_S
        while time.monotonic() < deadline_s:
            found = [one for one in self._server.attempts() if fits(one)]
            if found:
                young = self._random.random() < 0.5
                return max(found, key=lambda one: one.age_ticks) if young else self._random.choice(found)
            self.serve()
        return None

    def _signal(self, processes: list[Process], kind: str, victim: LivingAttempt) -> None:
        if "stop" in kind:
            stopped = [process for process in processes if _send(process, signal.SIGSTOP)]
            time.sleep(self._random.uniform(0.0, STOPPED_LIMIT_S))
            if kind.endswith("continue"):
                for process in stopped:
                    _send(process, signal.SIGCONT)
                self.counts[kind] += 1
                return
        if kind.startswith("daemon"):
            self.serve()
            self._server.kill()
        self.hit.add(victim.task)
        reached = [_send(process, signal.SIGKILL) for process in processes]
        self.counts[kind if any(reached) else MISSED] += 1
        if any(reached) and "command" in kind and self._server.pid is not None and self._random.random() < 0.5:
            self._wait_for_end(victim.task)

    def _wait_for_end(self, task: int) -> None:
        """How long the daemon takes to record the end. A task that comes back has not ended."""
        began_s = time.monotonic()
        try:
            with Client(self._server.paths.socket) as client:
                known = len(client.task(task).attempts)
                while (view := client.task(task)).state in ("starting", "running") and len(view.attempts) == known:
                    if time.monotonic() - began_s > END_LIMIT_S:
                        self.errors.append(f"task {task}: its command was killed, and its end is not on record")
                        return
                    time.sleep(0.002)
        except NotFound:  # it was started before a copy took the database's place
            return
        except CarmaError as error:
            self.errors.append(f"task {task}: {error}")
            return
        self.ended_s.append(time.monotonic() - began_s)


def _send(process: Process, number: int) -> bool:
    return procfs.send(process.pid, process.start_ticks, number)
