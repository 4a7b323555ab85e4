"""What every estimator keeps to: an answer or a refusal, under its own name, that can be booked and stored."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from carma.core.model.events import TaskEstimated
from carma.core.model.settings import Memory, Rules
from carma.core.model.values import AttemptKey, Estimate, Gpu, GpuId, NoEstimate, Owner, TaskId, TaskSpec
from carma.core.ports import EstimateRequest, Estimator, PastRun
from carma.estimate.combination import make_estimators
from carma.paths import find_paths
from carma.plugins import ESTIMATORS
from carma.store.codec import read_event, write_event
from carma.store.memory import MemoryStore
from carma.testing.fixed_estimator import Fixed
from carma.trial.protocol import Context
from carma.trial.replay import card_constants as constants
from gpumemnet.serving.estimator import FOLDER
from gpumemnet.serving.model_facts import Kind
from gpumemnet_fixtures import gpumemnet_models
from tests.trials import ScriptedTrials

GPU = Gpu(id=GpuId("GPU-0"), index=0, name="Test GPU", memory_mib=40_960)
KINDS: tuple[Kind, ...] = get_args(Kind)
ALICE = Owner(1001, 1001, "alice")
KNOWN = TaskSpec(command=("python", "train.py"), directory="/home/alice", gpu_memory_mib=3_000)
REQUESTS = {
    "known": KNOWN,
    "declared only": TaskSpec(command=("other",), directory="/", gpu_memory_mib=1),
    "unknown": TaskSpec(command=("python", "other.py"), directory="/home/alice"),
    "odd": TaskSpec(command=(), directory="", environment={"": "\0"}, gpus=16),
    "nonsense declared": TaskSpec(command=("x",), directory="/", gpu_memory_mib=-5),
}


ALL = (
    "accelerate", "declared", "dnnmem", "fake-tensor", "gpumemnet", "gpumemnet-transformer", "history", "horus",
    "llmem", "trace", "zero2", "zero3",
)  # fmt: skip
NEEDS_ANOTHER_PACKAGE = ("zero2", "zero3")
LEARNED = ("gpumemnet", "gpumemnet-transformer")


def shipped() -> list[str]:
    own = [entry.name for entry in entry_points(group=ESTIMATORS) if entry.value.startswith("carma.")]
    return sorted(own)


def made(name: str) -> Estimator:
    if name == "fixed":
        return Fixed(Estimate(footprint_mib=5, upper_mib=6, source="fixed"))
    archive = MemoryStore()
    archive.remember(
        PastRun(
            key=AttemptKey(TaskId(1), 1),
            uid=ALICE.uid,
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
    )
    rules = Rules(memory=Memory(sources=(name,)))
    trials = ScriptedTrials(KNOWN.command)
    (estimator,) = make_estimators(Context(archive=archive, gpus=(GPU,), rules=rules, trials=trials))
    return estimator


def request_for(spec: TaskSpec, gpus: tuple[Gpu, ...] = (GPU,)) -> EstimateRequest:
    return EstimateRequest(task=TaskId(2), owner=ALICE, spec=spec, gpus=gpus)


@pytest.mark.parametrize("name", [*ALL, "fixed"])
@pytest.mark.parametrize("asked", REQUESTS)
@pytest.mark.parametrize("gpus", [(), (GPU,)], ids=["no GPU", "one GPU"])
def test_it_answers_or_refuses_under_its_own_name(name: str, asked: str, gpus: tuple[Gpu, ...]) -> None:
    estimator = made(name)
    request = request_for(REQUESTS[asked], gpus)
    answer = estimator.estimate(request)
    assert estimator.name == answer.source == name
    if isinstance(answer, Estimate):
        assert 0 < answer.footprint_mib <= answer.upper_mib
        event = TaskEstimated(1.0, request.task, answer)
    else:
        assert answer.reason
        assert answer.reason == answer.reason.strip()
        event = TaskEstimated(1.0, request.task, None, (answer,))
    assert read_event(write_event(event)) == event


@pytest.mark.parametrize("name", [*ALL, "fixed"])
def test_the_same_question_gets_the_same_answer(name: str) -> None:
    estimator = made(name)
    request = request_for(KNOWN)
    before = msgspec.json.encode(request)
    assert estimator.estimate(request) == estimator.estimate(request)
    assert msgspec.json.encode(request) == before


@pytest.mark.parametrize("name", [name for name in ALL if name not in (*NEEDS_ANOTHER_PACKAGE, *LEARNED)])
def test_each_knows_something_and_refuses_something(name: str) -> None:
    estimator = made(name)
    assert isinstance(estimator.estimate(request_for(KNOWN)), Estimate)
    assert isinstance(estimator.estimate(request_for(REQUESTS["unknown"])), NoEstimate)


@pytest.mark.parametrize("name", LEARNED)
def test_what_was_learned_answers_for_what_it_has_learned(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With models of its own making: those that are shipped refuse what lies outside of their data."""
    monkeypatch.setenv("CARMA_HOME", str(tmp_path))
    own = constants.own_folder(find_paths({"CARMA_HOME": str(tmp_path)})).with_name(FOLDER)
    for kind in KINDS:
        gpumemnet_models.save(own, gpumemnet_models.facts("mlp", kind))
    estimator = made(name)
    assert isinstance(estimator.estimate(request_for(KNOWN)), Estimate)
    assert isinstance(estimator.estimate(request_for(REQUESTS["unknown"])), NoEstimate)


def test_the_shipped_ones_are_all_tested_here() -> None:
    assert shipped() == sorted(ALL)
