"""The simulator's truth lies about the model as far as was measured."""

from __future__ import annotations

from math import log
from statistics import fmean, pstdev

import pytest

from carma.core.scheduling.sharing_model import Mechanism, spread
from carma_lab.simulator.setup import Noise


def _logs(tasks: int, rate: float, mechanism: Mechanism = "mps", scale: float = 1.0) -> list[float]:
    """Of the factors of tasks in many groups, none of which is like another."""
    noise = Noise(scale, 0, mechanism)
    groups = [[f"{group}-{place}" for place in range(tasks)] for group in range(4000 // tasks)]
    return [log(factor) for names in groups for factor in noise.factors(names, [rate] * tasks)]


@pytest.mark.parametrize("mechanism", ["mps", "timeslice"])
@pytest.mark.parametrize("tasks", [2, 3, 4])
@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_true_rates_are_spread_as_measured_for_that_number_of_tasks(
    mechanism: Mechanism, tasks: int, rate: float
) -> None:
    logs = _logs(tasks, rate, mechanism)
    assert pstdev(logs) == pytest.approx(spread(rate, tasks, mechanism), rel=0.05)
    assert fmean(logs) == pytest.approx(0.0, abs=0.01)


def test_a_part_of_the_noise_is_that_part_of_the_spread() -> None:
    whole, half = _logs(3, 0.7), _logs(3, 0.7, scale=0.5)
    assert half == pytest.approx([0.5 * each for each in whole])


def test_without_noise_the_model_is_the_truth() -> None:
    assert Noise(0.0, 1).factors(["a", "b"], [0.4, 0.9]) == [1.0, 1.0]


def test_alone_there_is_nothing_to_be_wrong_about() -> None:
    assert Noise(1.0, 1).factors(["a"], [1.0]) == [1.0]


def test_a_group_that_meets_again_has_its_factors_again_in_any_order() -> None:
    noise = Noise(1.0, 7)
    a, b, c = noise.factors(["a", "b", "c"], [0.5, 0.6, 0.7])
    assert noise.factors(["c", "a", "b"], [0.7, 0.5, 0.6]) == [c, a, b]
    assert Noise(1.0, 7).factors(["a", "b", "c"], [0.5, 0.6, 0.7]) == [a, b, c]
    assert Noise(1.0, 8).factors(["a", "b", "c"], [0.5, 0.6, 0.7]) != [a, b, c]
    assert noise.factors(["a", "b"], [0.5, 0.6])[0] != a
