"""The estimators of this distribution keep the contract of estimators, and answer for what they know."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import get_args

import pytest

from carma.core.model.settings import Memory, Rules
from carma.core.model.values import Estimate, NoEstimate, TaskSpec
from carma.core.ports import Estimator
from carma.estimate.combination import make_estimators
from carma.paths import find_paths
from carma.plugins import ESTIMATORS
from carma.testing.estimator_contract import GPU, EstimatorContract, estimate_request, estimator_context
from carma.trial.replay import card_constants as constants
from gpumemnet.serving.estimator import FOLDER
from gpumemnet.serving.model_facts import Kind
from gpumemnet_fixtures import gpumemnet_models
from tests.trials import ScriptedTrials

KNOWN = EstimatorContract.known
UNKNOWN = TaskSpec(command=("python", "other.py"), directory="/home/alice")
KINDS: tuple[Kind, ...] = get_args(Kind)
ALL = (
    "accelerate", "dnnmem", "fake-tensor", "gpumemnet", "gpumemnet-transformer", "horus", "llmem", "zero2", "zero3",
)  # fmt: skip
NEEDS_ANOTHER_PACKAGE = ("zero2", "zero3")
LEARNED = ("gpumemnet", "gpumemnet-transformer")


def shipped() -> list[str]:
    own = [entry.name for entry in entry_points(group=ESTIMATORS) if entry.value.startswith("gpumemnet.")]
    return sorted(own)


def made(name: str) -> Estimator:
    context = estimator_context(ScriptedTrials(KNOWN.command))
    (estimator,) = make_estimators(replace(context, rules=Rules(memory=Memory(sources=(name,)))))
    return estimator


@pytest.mark.parametrize("name", ALL)
class TestEstimators(EstimatorContract):
    @pytest.fixture(autouse=True)
    def _name(self, name: str) -> None:
        self.name = name

    def make(self) -> Estimator:
        return made(self.name)


@pytest.mark.parametrize("name", [name for name in ALL if name not in (*NEEDS_ANOTHER_PACKAGE, *LEARNED)])
def test_each_knows_something_and_refuses_something(name: str) -> None:
    estimator = made(name)
    assert isinstance(estimator.estimate(estimate_request(KNOWN, GPU)), Estimate)
    assert isinstance(estimator.estimate(estimate_request(UNKNOWN, GPU)), NoEstimate)


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
    assert isinstance(estimator.estimate(estimate_request(KNOWN, GPU)), Estimate)
    assert isinstance(estimator.estimate(estimate_request(UNKNOWN, GPU)), NoEstimate)


def test_the_shipped_ones_are_all_tested_here() -> None:
    assert shipped() == sorted(ALL)
