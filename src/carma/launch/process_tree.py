"""All processes of an attempt, and signals to them.

Programs leave their parents. A process belongs to the attempt
1. if it descends from the runner, to which the kernel gives orphans (the runner is a subreaper);
2. if it is in the session that the command began;
3. once the runner has ended: if it is in the attempt's cgroup, or has the attempt's token in its environment.
The runner itself is never a member: signals are not for it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping

from carma import procfs
from carma.core.model.values import AttemptKey
from carma.launch.attempt_cgroups import AttemptCgroups
from carma.launch.attempt_files import Started
from carma.procfs import Process

TOKEN_VARIABLE = "CARMA_LAUNCH"
KILL_ROUNDS = 20  # enough for anything but a fork bomb; a repeated request goes on
STOP_ROUNDS, STOP_PAUSE_S = 20, 0.005  # a process that gets SIGSTOP stands still some time later

ProcessIdentity = tuple[int, int]  # pid and start time
Table = dict[int, Process]


class ProcessTrees:
    def __init__(self, groups: AttemptCgroups | None = None) -> None:
        self._groups = groups
        self._tokens: dict[ProcessIdentity, str] = {}  # of processes that belong to no attempt by descent

    def members(self, known: Mapping[AttemptKey, Started]) -> dict[int, AttemptKey]:
        """The living processes of those attempts; /proc is read once for all of them."""
        return self._members(procfs.processes(), known) if known else {}

    def _members(self, table: Table, known: Mapping[AttemptKey, Started]) -> dict[int, AttemptKey]:
        found = by_descent(table, known)
        orphaned = {s.token: key for key, s in known.items() if not lives(table, s.runner.pid, s.runner.start_ticks)}
        if orphaned:
            if self._groups is not None:
                for key in orphaned.values():
                    found |= {pid: key for pid in self._groups.members(key) if pid in table}
            found |= self._by_token(table, found, orphaned)
        return {pid: key for pid, key in found.items() if not table[pid].ended}

    def _by_token(
        self, table: Table, found: Mapping[int, AttemptKey], orphaned: Mapping[str, AttemptKey]
    ) -> dict[int, AttemptKey]:
        """Environments are read once for each process: they do not change, and there may be thousands."""
        before, self._tokens = self._tokens, {}
        extra = {}
        for one in table.values():
            if one.pid in found:
                continue
            identity = one.pid, one.start_ticks
            token = before[identity] if identity in before else read_token(one.pid)
            self._tokens[identity] = token
            if token in orphaned:
                extra[one.pid] = orphaned[token]
        return extra

    def signal(self, key: AttemptKey, started: Started, number: int) -> None:
        """Signals the tree from the root down, so that a shell does not go on to its next command. SIGKILL is repeated
        until no new process appears. Other signals are sent once: a program may answer them by starting a clean-up
        process."""
        signalled: set[ProcessIdentity] = set()
        runner = started.runner
        if number == signal.SIGKILL and self._groups is not None and not procfs.alive(runner.pid, runner.start_ticks):
            self._groups.kill(key)
        for _ in range(KILL_ROUNDS if number == signal.SIGKILL else 1):
            table = procfs.processes()
            new = [one for one in self._of(table, key, started) if (one.pid, one.start_ticks) not in signalled]
            if not new:
                return
            for one in new:
                procfs.send(one.pid, one.start_ticks, number)
                signalled.add((one.pid, one.start_ticks))

    def stop(self, key: AttemptKey, started: Started) -> bool:
        """Freeze the tree, or SIGSTOP from the root down, until two looks in a row find the same processes and none of
        them runs: one may fork before its own turn. False if some run, for example in an uninterruptible call."""
        freezer = self._groups.freezer(key) if self._groups is not None else None
        before: set[int] | None = None
        for _ in range(STOP_ROUNDS):
            members = self._of(procfs.processes(), key, started)
            pids = {one.pid for one in members}
            if freezer is not None:
                still = freezer.freeze(sorted(pids))
            else:
                running = [one for one in members if one.state not in procfs.STOPPED]
                still = not running
                for one in running:
                    procfs.send(one.pid, one.start_ticks, signal.SIGSTOP)
            if still and pids == before:
                return True
            before = pids if still else None
            time.sleep(STOP_PAUSE_S)
        return False

    def resume(self, key: AttemptKey, started: Started) -> None:
        """SIGCONT goes from the leaves up, so that no shell finds its command stopped."""
        freezer = self._groups.freezer(key) if self._groups is not None else None
        if freezer is not None:
            freezer.thaw()
        for one in reversed(self._of(procfs.processes(), key, started)):
            if one.state in procfs.STOPPED:
                procfs.send(one.pid, one.start_ticks, signal.SIGCONT)

    def _of(self, table: Table, key: AttemptKey, started: Started) -> list[Process]:
        """The living processes of one attempt, from the root down."""
        members = (table[pid] for pid in self._members(table, {key: started}))
        return sorted(members, key=lambda one: sum(1 for _ in ancestors(table, one.pid)))

    def listeners(self, key: AttemptKey, started: Started, number: int) -> list[ProcessIdentity]:
        """Processes that have a handler for the signal and no ancestor that has one. A shell around the program has no
        handler and would be ended by the signal. A data loader's workers inherit the handler, but not the work."""
        table = procfs.processes()
        members = self._members(table, {key: started})
        listening = {pid for pid in members if procfs.handles_signal(pid, number)}
        first = [pid for pid in listening if not any(up in listening for up in ancestors(table, pid))]
        return [(pid, table[pid].start_ticks) for pid in first]


def by_descent(table: Table, known: Mapping[AttemptKey, Started]) -> dict[int, AttemptKey]:
    """Processes of the tree, by parents and by session. A session does not count if another process has the pid of its
    leader by now."""
    roots: dict[int, AttemptKey] = {}
    sessions: dict[int, AttemptKey] = {}
    runners: set[int] = set()
    for key, started in known.items():
        if lives(table, started.runner.pid, started.runner.start_ticks):
            roots[started.runner.pid] = key
            runners.add(started.runner.pid)
        if started.pid not in table or lives(table, started.pid, started.start_ticks):
            sessions[started.pid] = key
            roots[started.pid] = key
    found = {pid: roots[root] for pid, root in procfs.rooted(table, roots).items() if pid not in runners}
    for one in table.values():
        if one.pid not in found and one.session in sessions:
            found[one.pid] = sessions[one.session]
    return found


def lives(table: Table, pid: int, start_ticks: int) -> bool:
    one = table.get(pid)
    return one is not None and one.start_ticks == start_ticks


def ancestors(table: Table, pid: int) -> Iterator[int]:
    """Ancestors, from the parent upwards."""
    steps = 0
    while (one := table.get(pid)) is not None and steps < len(table):
        pid = one.parent
        steps += 1
        yield pid


def read_token(pid: int) -> str:
    return procfs.environment_value(pid, TOKEN_VARIABLE.encode()).decode("ascii", "replace")
