"""The training loop that is measured: how many steps the optimizer really made, as the row says it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gpumemnet.dataset
from gpumemnet_fixtures.torch_programs import run_in_torch

pytest.importorskip("torch")

INSIDE = Path(gpumemnet.dataset.__file__).parent / "inside"
# What the loop says, and what the optimizer's own state says: Adam counts the steps of each weight. A scale beyond all
# numbers makes every gradient infinite, and the scaler then leaves the optimizer's step out.
PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
import loop
model = [{"op": "linear", "out": 8}, {"op": "act", "f": "relu"}, {"op": "linear", "out": 4}]
config = {"id": "a", "batch": 4, "input": [16], "outputs": 4, "optimizer": "adam", "model": model}
training = loop.Training({**config, "precision": sys.argv[2]}, "cpu", loop.random_numbers())

def made():
    return sorted({int(state["step"]) for state in training.optimizer.state.values()}) or [0]

said = [(training.stepped, made())]
for overflows in json.loads(sys.argv[3]):
    if overflows:
        training.scaler.update(2.0**127)
    training.step()
    said.append((int(training.stepped), made()))
    if overflows:
        training.scaler.update(1.0)
print(json.dumps(said))
"""


def counted(precision: str, overflows: list[bool]) -> list[Any]:
    return list(json.loads(run_in_torch(PROGRAM, str(INSIDE), precision, json.dumps(overflows))))


@pytest.mark.parametrize("precision", ["fp32", "bf16-amp", "fp16-amp"])
def test_a_step_that_the_optimizer_made_counts(precision: str) -> None:
    assert counted(precision, [False] * 3) == [[0, [0]], [1, [1]], [2, [2]], [3, [3]]]


def test_a_step_that_the_scaler_left_out_does_not_count() -> None:
    assert counted("fp16-amp", [False, True, False, True]) == [[0, [0]], [1, [1]], [1, [1]], [2, [2]], [2, [2]]]
