"""`carma bench crash`: kills at random moments beside a stream of submissions, and copies of the database.

It prints the figures and exits with 1 if an acknowledged task was lost, run twice, stuck or given a wrong outcome, or
if the daemon ended by itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from carma.core.model.values import Record
from carma.testing.private_daemon import ending_in_order
from carma_lab.bench.crash.copies import METHODS, PROBLEMS, Copier, Finding
from carma_lab.bench.crash.kills import ALL, KINDS, MISSED, Killer
from carma_lab.bench.crash.server import CrashServer, crash_server
from carma_lab.bench.crash.stream import SubmissionStream
from carma_lab.bench.crash.verdict import Excused, judge
from carma_lab.bench.results_file import Figure, FigureLog, percentiles

SHOWN_PROBLEMS = 20


class Options(Record, frozen=True, kw_only=True):
    """`json` is a file to write, or "-" for standard output. `restores`: how often a copy replaces the database."""

    kills: int = 1000
    seed: int = 1
    restores: int = 20
    json: str | None = None


class Study:
    """One run: the daemon, its client, the copier and the killer. After `run` it has the findings."""

    def __init__(self, server: CrashServer, seed: int, weights: dict[str, int], *, copies: bool) -> None:
        self._server = server
        self._stream = SubmissionStream(server, seed)
        self.restores = 0
        self.killer = Killer(server, seed + 1, weights, lambda: self._stream.answers)
        self._copier = Copier(server, self._stream, seed + 2) if copies else None
        self._rolled_back: set[int] = set()
        self._replayed: set[int] = set()

    def run(self, kills: int, restores: int) -> Study:
        threads: list[SubmissionStream | Copier] = [self._stream, *filter(None, [self._copier])]
        for thread in threads:
            thread.start()
        try:
            every = kills // max(1, restores)
            while self.killer.done < kills:
                if self._copier is not None and self.killer.done >= every * (self.restores + 1) - 1:
                    self._restore(self._copier)
                else:
                    self.killer.strike()
        finally:
            for thread in threads:
                thread.finish()
        self.killer.serve()
        excused = Excused(frozenset(self.killer.hit), frozenset(self._rolled_back), frozenset(self._replayed))
        self.verdict = judge(self._server, self._stream, excused)
        return self

    def _restore(self, copier: Copier) -> None:
        """A copy takes the place of the database, and the daemon goes on in the same home, with the same logs."""
        copy = copier.take()
        try:
            if copy is None:
                self.killer.strike()
                return
            with self._stream.lock:
                self.killer.replace_database(copy.folder)
                acknowledged = self._stream.acknowledged
                for task in [task for task in acknowledged if task not in copy.acknowledged]:
                    del acknowledged[task]
                    self._rolled_back.add(task)
            self._rolled_back |= {int(file.name) for file in (self._server.work / "runs").iterdir()}
            self._replayed |= copy.unfinished
            self.restores += 1
        finally:
            copier.release()

    @property
    def kills(self) -> dict[str, int]:
        return {kind: count for kind, count in sorted(self.killer.counts.items()) if kind != MISSED}

    @property
    def problems(self) -> tuple[str, ...]:
        """Problems of tasks, daemon, client and study; empty in a good run."""
        errors = (*self.killer.errors, *self._stream.errors, *self._server.unexpected_ends)
        return (*self.verdict.problems, *errors)

    @property
    def copies(self) -> Sequence[Finding]:
        return () if self._copier is None else self._copier.findings


def study(kills: int, seed: int, *, weights: dict[str, int] = ALL, restores: int = 0) -> Study:
    """Runs `kills` kills on a private daemon with virtual GPUs, which is removed afterwards."""
    with ending_in_order(), crash_server() as server:
        return Study(server, seed, weights, copies=restores > 0).run(kills, restores)


def run(options: Options) -> int:
    log = FigureLog(options.json)
    began_s = time.monotonic()
    result = study(options.kills, options.seed, restores=options.restores)
    for figure in figures(result):
        log.add(figure)
    took_s = round(time.monotonic() - began_s, 1)
    outcomes, problems = result.verdict.outcomes, result.problems
    log.write("crash", options, seed=options.seed, took_s=took_s, outcomes=outcomes, problems=problems)
    for problem in result.problems[:SHOWN_PROBLEMS]:
        log.say(problem)
    return 1 if result.problems else 0


def figures(result: Study) -> Iterator[Figure]:
    yield _count("kills", sum(result.kills.values()), "signals that reached their process, by kind below")
    for kind, count in result.kills.items():
        yield _count(f"kills.{kind}", count, KINDS[kind][1])
    verdict = result.verdict
    yield _count("tasks.acknowledged", verdict.acknowledged, "submissions that were answered")
    yield _count("tasks.started", verdict.started, "tasks whose command ran, also those without an answer")
    yield _count("tasks.lost", len(verdict.lost), "acknowledged, and unknown afterwards")
    yield _count("tasks.run_twice", len(verdict.run_twice), "an attempt started twice or without a reason")
    yield _count("tasks.stuck", len(verdict.stuck), "not finished after everything was continued")
    yield _count("tasks.wrong_outcome", len(verdict.wrong_outcome), "not killed, and on record with another outcome")
    yield _count("survivors", verdict.survivors, "processes of finished tasks that still ran at the end")
    yield Figure(name="booked", value=verdict.still_booked_mib, unit="MiB", how="booked on all GPUs at the end")
    yield from _times("restart", result.killer.restart_s, "start of a daemon (modules loaded) to its first answer")
    yield from _times("restart.cold", result.killer.cold_restart_s, "the same for `carma up`")
    yield from _times("ended", result.killer.ended_s, "SIGKILL of a command to the end of its task on record")
    yield from _copies(result.copies)
    yield _count("restores", result.restores, "a whole copy took the database's place and the daemon went on")


def _copies(findings: Sequence[Finding]) -> Iterator[Figure]:
    for method in METHODS:
        of_method = [finding for finding in findings if finding.method == method]
        torn = [finding.problem for finding in of_method if finding.problem]
        yield _count(f"copies.{method}", len(of_method), "copies that were opened again")
        yield _count(f"copies.{method}.torn", len(torn), "damaged, or without a task that was acknowledged before")
        for problem, how in PROBLEMS.items():
            if method != "backup":
                yield _count(f"copies.{method}.{problem}", torn.count(problem), how)


def _count(name: str, value: int, how: str) -> Figure:
    return Figure(name=name, value=value, unit="", how=how)


def _times(name: str, values_s: Sequence[float], how: str) -> Iterator[Figure]:
    if values_s:
        how = f"{how}; {len(values_s)} times"
        yield from percentiles(name, [1000 * value for value in values_s], how)
