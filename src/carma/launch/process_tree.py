"""All processes of an attempt, and signals to them.

Programs leave their parents. A process belongs to the attempt
1. if it descends from the runner, to which the kernel gives orphans (the runner is a subreaper);
2. if it is in the session that the command began;
3. once the runner is dead: if it is in the attempt's cgroup, or has the attempt's token in its environment.
The runner itself is never a member: signals are not for it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Mapping

from carma.core.model.values import AttemptKey
from carma.launch import procfs
from carma.launch.attempt_cgroups import AttemptCgroups
from carma.launch.attempt_files import Started
from carma.launch.environment import TOKEN_VARIABLE

KILL_ROUNDS = 20  # enough for anything but a fork bomb; whoever wants it dead asks again

Identity = tuple[int, int]  # pid and start time


class Trees:
    def __init__(self, groups: AttemptCgroups | None = None) -> None:
        self._groups = groups
        self._tokens: dict[Identity, str] = {}  # of processes that belong to no attempt by descent

    def members(self, known: Mapping[AttemptKey, Started]) -> dict[int, AttemptKey]:
        """The living processes of those attempts; /proc is read once for all of them."""
        return self._members(procfs.processes(), known) if known else {}

    def _members(self, table: dict[int, procfs.Process], known: Mapping[AttemptKey, Started]) -> dict[int, AttemptKey]:
        found = by_descent(table, known)
        orphaned = {s.token: key for key, s in known.items() if not lives(table, s.runner.pid, s.runner.start_ticks)}
        if orphaned:
            found |= self._by_cgroup(table, orphaned.values())
            found |= self._by_token(table, found, orphaned)
        return {pid: key for pid, key in found.items() if not table[pid].ended}

    def _by_cgroup(self, table: Mapping[int, procfs.Process], keys: Iterable[AttemptKey]) -> dict[int, AttemptKey]:
        if self._groups is None:
            return {}
        return {pid: key for key in keys for pid in self._groups.members(key) if pid in table}

    def _by_token(
        self, table: dict[int, procfs.Process], found: Mapping[int, AttemptKey], orphaned: Mapping[str, AttemptKey]
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
        """From the top down, so that a shell does not go on to its next command. SIGKILL is repeated until nobody new
        appears. Other signals are sent once: a program may answer them by starting something that cleans up."""
        signalled: set[Identity] = set()
        if number == signal.SIGKILL and self._groups is not None and not procfs.alive(*_runner_of(started)):
            self._groups.kill(key)
        for _ in range(KILL_ROUNDS if number == signal.SIGKILL else 1):
            table = procfs.processes()
            members = [table[pid] for pid in self._members(table, {key: started})]
            new = [one for one in members if (one.pid, one.start_ticks) not in signalled]
            if not new:
                return
            for one in sorted(new, key=lambda one: depth(table, one.pid)):
                procfs.send(one.pid, one.start_ticks, number)
                signalled.add((one.pid, one.start_ticks))

    def listeners(self, key: AttemptKey, started: Started, number: int) -> list[Identity]:
        """Those that have a handler for the signal and no parent that has one. A shell around the program has none, and
        would die of it; a data loader's workers have their parent's handler, but not its work."""
        table = procfs.processes()
        members = self._members(table, {key: started})
        listening = {pid for pid in members if procfs.listens(pid, number)}
        first = [pid for pid in listening if not any(up in listening for up in ancestors(table, pid))]
        return [(pid, table[pid].start_ticks) for pid in first]


def _runner_of(started: Started) -> Identity:
    return started.runner.pid, started.runner.start_ticks


def by_descent(table: dict[int, procfs.Process], known: Mapping[AttemptKey, Started]) -> dict[int, AttemptKey]:
    """Through parents, and through the session. A session whose leader's pid is somebody else's by now is not ours."""
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


def lives(table: dict[int, procfs.Process], pid: int, start_ticks: int) -> bool:
    one = table.get(pid)
    return one is not None and one.start_ticks == start_ticks


def depth(table: dict[int, procfs.Process], pid: int) -> int:
    return sum(1 for _ in ancestors(table, pid))


def ancestors(table: dict[int, procfs.Process], pid: int) -> Iterator[int]:
    """From its parent upwards."""
    steps = 0
    while (one := table.get(pid)) is not None and steps < len(table):
        pid = one.parent
        steps += 1
        yield pid


def read_token(pid: int) -> str:
    return procfs.environment_value(pid, TOKEN_VARIABLE.encode()).decode("ascii", "replace")
