"""The replay of measured groups: what is judged has no part in what is known; the constants that ship were found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carma.core.scheduling import rate_correction
from lab.tools import sharing_online as online
from lab.tools.sharing_forms import Rates
from lab.tools.sharing_online import Predicted

ROOT = Path(__file__).parents[2]
FOUND: dict[str, Any] = json.loads((ROOT / "lab" / "results" / "simulation" / "sharing.json").read_text())["online"]


def test_the_variances_that_ship_are_those_that_were_found() -> None:
    shipped = (rate_correction.OWN, rate_correction.BESIDE, rate_correction.NOISE)
    assert shipped == tuple(FOUND["known"]["variances"][name] for name in ("own", "beside", "noise"))


@pytest.mark.parametrize("demands", ["known", "guessed"])
def test_errors_are_below_their_limits_and_what_was_observed_makes_them_smaller(demands: str) -> None:
    same, other = FOUND[demands]["same_group"], FOUND[demands]["other_groups"]
    assert same["before"]["mean_abs"] <= 0.09
    assert same["after"]["mean_abs"] <= 0.07
    assert other["after"]["mean_abs"] < other["before"]["mean_abs"]
    errors = [each[when] for each in (same, other) for when in ("before", "after")]
    assert min(one["kept_to_cautious"] for one in errors) >= 0.9


def test_what_is_observed_of_a_group_is_used_for_the_same_group() -> None:
    group = Predicted(("a", "b"), (0.8, 0.6), (0.7, 0.6))
    first, second = online.same_group(group, group)
    assert abs(first.after[0] - 0.7) < 0.02 < abs(first.before[0] - 0.7)
    assert second.after[0] == second.before[0] == 0.6
    assert second.after[1] > second.before[1], "less caution"


def test_a_group_is_never_predicted_from_itself() -> None:
    groups = [Predicted(("a", "b"), (0.8, 0.6), (0.7, 0.6))] * 2
    assert [one.before == one.after for one in online.other_groups(groups, 0)] == [True, True]
    third = Predicted(("a", "c"), (0.8, 0.6), (0.7, 0.6))
    found = list(online.other_groups([*groups, third], 1))
    assert len(found) == 4
    assert sum(one.before != one.after for one in found) == 1, "the second one of a"


def test_the_variances_of_made_up_groups_are_found_again() -> None:
    random = np.random.default_rng(5)
    own = random.normal(0.0, 0.5, 40)
    pairs = [(one, other) for one in range(40) for other in range(one)]
    twice: list[tuple[Predicted, Predicted]] = []
    for pair in pairs:
        beside = own[list(pair)] + random.normal(0.0, 0.4, 2)
        first, second = (0.5 * np.exp(0.23 * (beside + random.normal(0.0, 0.3, 2))) for _ in range(2))
        names = (str(pair[0]), str(pair[1]))
        twice.append((Predicted(names, (0.5, 0.5), tuple(first)), Predicted(names, (0.5, 0.5), tuple(second))))
    was, tasks = (np.array([each for one, _ in twice for each in getattr(one, name)]) for name in ("was", "tasks"))
    empty, unseen = np.zeros((len(was), 5)), np.full(len(was), 0.5)
    rates = Rates(empty, empty, empty, np.full(len(was), 2.0), was, tasks, np.arange(len(was)), [])
    found = online.variances(unseen, rates, twice)
    assert found["own"] == pytest.approx(own.var(), rel=0.1)
    assert found["beside"] == pytest.approx(0.16, rel=0.1)
    assert found["noise"] == pytest.approx(0.09, rel=0.1)
