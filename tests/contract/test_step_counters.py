"""The step files of attempts and the fake in memory keep the contract of step counters."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from carma.core.model.values import AttemptKey
from carma.launch.step_metering import StepFiles
from carma.step_file import slot_of
from carma.testing.step_counters import FakeStepCounters, StepCountersContract, StepCountersSubject


def in_memory(_: Path) -> StepCountersSubject:
    fake = FakeStepCounters()
    return StepCountersSubject(fake, fake.count)


def files(directory: Path) -> StepCountersSubject:
    began_ns = time.monotonic_ns() - 10**13  # may be before the boot: only a difference counts

    def count(key: AttemptKey, steps: int, age_s: float) -> None:
        folder = directory / str(key)
        folder.mkdir(exist_ok=True)
        last_ns = time.monotonic_ns() - int(age_s * 1e9)
        (folder / "steps.bin").write_bytes(slot_of(1, steps, max(1, min(began_ns, last_ns)), max(1, last_ns)))

    return StepCountersSubject(StepFiles(directory), count)


class TestStepCounters(StepCountersContract):
    @pytest.fixture(params=[in_memory, files])
    def subject(self, request: pytest.FixtureRequest, tmp_path: Path) -> StepCountersSubject:
        made: StepCountersSubject = request.param(tmp_path)
        return made
