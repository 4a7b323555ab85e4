"""Step counters in memory, and what every step counter must do, as tests: subclass `StepCountersContract` and define
the fixture `subject`.

pytest finds the inherited tests. This module does not import pytest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from carma.core.model.values import AttemptKey, TaskId
from carma.core.ports import StepCount, StepCounters

NEAR_S = 60.0  # more than a test takes


class FakeStepCounters:
    """`counts` has what a read returns."""

    def __init__(self) -> None:
        self.counts: dict[AttemptKey, StepCount] = {}

    def count(self, key: AttemptKey, steps: int, age_s: float = 0.0) -> None:
        self.counts[key] = StepCount(key, steps, age_s)

    def read(self, keys: Iterable[AttemptKey]) -> tuple[StepCount, ...]:
        return tuple(self.counts[key] for key in keys if key in self.counts)


class StepCountersSubject(NamedTuple):
    """`make(key, steps, age_s)` sets an attempt's steps and the age of its last step."""

    counters: StepCounters
    make: Callable[[AttemptKey, int, float], None]


def key(task: int) -> AttemptKey:
    return AttemptKey(TaskId(task), 1)


class StepCountersContract:
    def test_an_attempt_of_which_nothing_is_known_has_no_count(self, subject: StepCountersSubject) -> None:
        assert subject.counters.read([key(9)]) == ()
        assert subject.counters.read([]) == ()

    def test_counts_have_the_order_of_the_keys(self, subject: StepCountersSubject) -> None:
        subject.make(key(1), 10, 0.0)
        subject.make(key(2), 20, 0.0)
        found = subject.counters.read([key(2), key(7), key(1)])
        assert [(one.key, one.steps) for one in found] == [(key(2), 20), (key(1), 10)]

    def test_the_age_is_that_of_the_last_step(self, subject: StepCountersSubject) -> None:
        subject.make(key(1), 10, 1_000.0)
        (found,) = subject.counters.read([key(1)])
        assert 1_000.0 <= found.age_s < 1_000.0 + NEAR_S

    def test_a_later_read_has_the_later_count(self, subject: StepCountersSubject) -> None:
        subject.make(key(1), 10, 100.0)
        subject.counters.read([key(1)])
        subject.make(key(1), 11, 0.0)
        (found,) = subject.counters.read([key(1)])
        assert found.steps == 11
        assert 0.0 <= found.age_s < NEAR_S
