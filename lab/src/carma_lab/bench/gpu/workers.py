"""Persistent worker processes: started once and used many times, so that a measurement needs no start-up.

A worker that dies or does not answer raises an exception with the last line that it wrote; the study never hangs.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

START_LIMIT_S = 240.0  # importing torch, cuDNN's first kernels, many at once
ANSWER_LIMIT_S = 60.0  # beyond the span that was asked for
END_LIMIT_S = 20.0


class WorkerDied(Exception):
    """A worker ended or does not answer; the text says whose it was and why."""


class Span(msgspec.Struct, frozen=True):
    """How long the tasks run together before they are measured, and how long they are measured."""

    warm_s: float
    measure_s: float


class Worker:
    """One worker process; `percent` is its MPS active thread percentage (100: none set)."""

    def __init__(self, name: str, worker: Sequence[str], environment: Mapping[str, str], percent: int = 100) -> None:
        self.name, self.percent = name, percent
        limited = {} if percent == 100 else {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent)}
        # Without the MPS variables of the caller's shell, which would change what is measured.
        own = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_MPS_")}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the worker
        self._process = subprocess.Popen(
            [*worker, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**own, **environment, **limited},
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def ready(self) -> dict[str, Any]:
        """The worker's answer after its first steps."""
        return self._answer(START_LIMIT_S)

    def order(self, start: float, span: Span) -> None:
        """Orders a run at `start` (monotonic). A dead worker is noticed when its answer is awaited."""
        order = {"start": start, "warm_s": span.warm_s, "measure_s": span.measure_s}
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def answer(self, span: Span) -> dict[str, Any]:
        return self._answer(span.warm_s + span.measure_s + ANSWER_LIMIT_S)

    def dismiss(self) -> None:
        """Closes the worker's input, at which it ends. Under MPS a signal could disturb its neighbours."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def close(self) -> None:
        self.dismiss()
        try:
            self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._end()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()

    def _answer(self, limit_s: float) -> dict[str, Any]:
        """One order has one line of answer, so nothing is ever left in the reader's buffer."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], limit_s)[0]:
            self._end()
            raise WorkerDied(f"{self.name}: no answer within {limit_s:.0f} s{self._last_line()}")
        line = self._process.stdout.readline()
        if not line:
            raise WorkerDied(f"{self.name}: its process ended with {self._process.wait()}{self._last_line()}")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError as error:
            self._end()
            raise WorkerDied(f"{self.name}: it answered {line.strip()!r}") from error
        return answer

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _last_line(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1].strip()[:300]}" if lines else ""


def all_answers(workers: Iterable[Worker], span: Span) -> list[dict[str, Any]]:
    """The answer of each worker. All are read before a death is reported, so that the others stay in step."""
    answers, deaths = [], []
    for worker in workers:
        try:
            answers.append(worker.answer(span))
        except WorkerDied as death:
            deaths.append(death)
    if deaths:
        raise WorkerDied("; ".join(map(str, deaths)))
    return answers


def close_all(workers: Iterable[Worker]) -> None:
    leaving = list(workers)
    for worker in leaving:
        worker.dismiss()
    for worker in leaving:
        worker.close()
