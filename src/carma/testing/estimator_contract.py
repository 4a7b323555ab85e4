"""What every estimator must do, as tests: subclass `EstimatorContract`. `FixedEstimator` is the shipped fake.

    class TestMine(EstimatorContract):
        def make(self) -> Estimator:
            return make(estimator_context())

pytest finds the inherited tests. This module does not import pytest.
"""

from __future__ import annotations

import msgspec

from carma.core.model.events import TaskEstimated
from carma.core.model.settings import Rules
from carma.core.model.values import Estimate, Gpu, GpuId, NoEstimate, Owner, TaskId, TaskSpec
from carma.core.ports import EstimateRequest, Estimator
from carma.store.codec import read_event, write_event
from carma.store.memory import MemoryStore
from carma.trial.protocol import Context, NoTrials, Trials

OWNER = Owner(1001, 1001, "alice")
GPU = Gpu(id=GpuId("GPU-0"), index=0, name="Test GPU", memory_mib=40_960)
ODD_SPECS = (
    TaskSpec(command=("other",), directory="/", gpu_memory_mib=1),
    TaskSpec(command=("python", "other.py"), directory="/home/alice"),
    TaskSpec(command=(), directory="", environment={"": "\0"}, gpus=16),
    TaskSpec(command=("x",), directory="/", gpu_memory_mib=-5),
)


class FixedEstimator:
    """Always gives the same answer."""

    quick = False

    def __init__(self, answer: Estimate | NoEstimate) -> None:
        self.name = answer.source
        self._answer = answer

    def estimate(self, request: EstimateRequest) -> Estimate | NoEstimate:  # noqa: ARG002 (the protocol's name)
        return self._answer


def estimator_context(trials: Trials = NoTrials(), archive: MemoryStore | None = None) -> Context:
    """The argument of an estimator's `make`: one GPU, default rules, no earlier runs, no trial runs."""
    return Context(archive=archive or MemoryStore(), gpus=(GPU,), rules=Rules(), trials=trials)


def estimate_request(spec: TaskSpec, *gpus: Gpu) -> EstimateRequest:
    return EstimateRequest(task=TaskId(2), owner=OWNER, spec=spec, gpus=gpus)


class EstimatorContract:
    known = TaskSpec(command=("python", "train.py"), directory="/home/alice", gpu_memory_mib=3_000)

    def make(self) -> Estimator:
        raise NotImplementedError

    def test_every_answer_has_its_own_name_as_source_and_can_be_booked_and_stored(self) -> None:
        estimator = self.make()
        for spec in (self.known, *ODD_SPECS):
            for gpus in ((), (GPU,)):
                answer = estimator.estimate(estimate_request(spec, *gpus))
                assert answer.source == estimator.name
                if isinstance(answer, Estimate):
                    assert 0 < answer.footprint_mib <= answer.upper_mib
                    event = TaskEstimated(1.0, TaskId(2), answer)
                else:
                    assert answer.reason
                    assert answer.reason == answer.reason.strip()
                    event = TaskEstimated(1.0, TaskId(2), None, (answer,))
                assert read_event(write_event(event)) == event

    def test_the_same_request_gets_the_same_answer_and_is_not_changed(self) -> None:
        estimator, request = self.make(), estimate_request(self.known, GPU)
        before = msgspec.json.encode(request)
        assert estimator.estimate(request) == estimator.estimate(request)
        assert msgspec.json.encode(request) == before
