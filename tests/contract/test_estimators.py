"""The product's estimators and the shipped fake keep the contract of estimators."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import entry_points

import pytest

from carma.core.model.settings import Memory, Rules
from carma.core.model.values import AttemptKey, Estimate, NoEstimate, TaskId, TaskSpec
from carma.core.ports import Estimator, PastRun
from carma.estimate.combination import make_estimators
from carma.plugins import ESTIMATORS
from carma.store.memory import MemoryStore
from carma.testing.estimator_contract import (
    GPU,
    OWNER,
    EstimatorContract,
    FixedEstimator,
    estimate_request,
    estimator_context,
)
from tests.trials import ScriptedTrials

KNOWN = EstimatorContract.known
SHIPPED = sorted(entry.name for entry in entry_points(group=ESTIMATORS) if entry.value.startswith("carma."))
EARLIER = PastRun(
    key=AttemptKey(TaskId(1), 1),
    uid=OWNER.uid,
    command=KNOWN.command,
    directory=KNOWN.directory,
    gpus=1,
    gpu_model=GPU.name,
    peak_mib=4_000,
    runtime_s=90.0,
    succeeded=True,
    collocated=False,
    ended_at=1.0,
)


def made(name: str) -> Estimator:
    if name == "fixed":
        return FixedEstimator(Estimate(footprint_mib=5, upper_mib=6, source="fixed"))
    archive = MemoryStore()
    archive.remember(EARLIER)
    context = estimator_context(ScriptedTrials(KNOWN.command), archive)
    (estimator,) = make_estimators(replace(context, rules=Rules(memory=Memory(sources=(name,)))))
    return estimator


@pytest.mark.parametrize("name", [*SHIPPED, "fixed"])
class TestEstimators(EstimatorContract):
    @pytest.fixture(autouse=True)
    def _name(self, name: str) -> None:
        self.name = name

    def make(self) -> Estimator:
        return made(self.name)


@pytest.mark.parametrize("name", SHIPPED)
def test_each_answers_a_known_request_and_refuses_an_unknown_one(name: str) -> None:
    unknown = TaskSpec(command=("python", "other.py"), directory="/home/alice")
    assert isinstance(made(name).estimate(estimate_request(KNOWN, GPU)), Estimate)
    assert isinstance(made(name).estimate(estimate_request(unknown, GPU)), NoEstimate)


@pytest.mark.parametrize(
    "wrong",
    [
        Estimate(footprint_mib=6, upper_mib=5, source="fixed"),
        Estimate(footprint_mib=0, upper_mib=5, source="fixed"),
        NoEstimate(source="fixed", reason=""),
    ],
)
def test_the_contract_finds_what_is_wrong(wrong: Estimate | NoEstimate) -> None:
    class Contract(EstimatorContract):
        def make(self) -> Estimator:
            return FixedEstimator(wrong)

    with pytest.raises(AssertionError):
        Contract().test_every_answer_has_its_own_name_as_source_and_can_be_booked_and_stored()
