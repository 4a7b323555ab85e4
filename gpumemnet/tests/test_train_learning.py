"""Learning and judging: nothing of a judged row's label reaches its answer; the same seed gives the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from gpumemnet.training import NAMES
from gpumemnet.training.cross_validation import Answers, Job, answer, by_chance, by_shape, compete
from gpumemnet.training.ensemble import Fit, at_level, cheapest, conformal, fit_boosted, fit_forests, learn
from gpumemnet.training.samples import MEDIAN, QUANTILES, Numbers, Samples, Scale, Wholes
from gpumemnet_fixtures.training_data import made, threads_as_they_were  # noqa: F401


def few_rounds() -> dict[str, Fit]:
    from gpumemnet.training.graph import fit_graph
    from gpumemnet.training.learners import fit_attention, fit_dense

    return {
        "mlp-based": partial(fit_dense, rounds=2),
        "transformer-based": partial(fit_attention, rounds=1),
        "graph": partial(fit_graph, rounds=1),
        "extra-trees": fit_forests,
        "boosted": fit_boosted,
    }


@pytest.fixture(scope="module")
def samples() -> Samples:
    return made(120)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rounds: how well they learn does not matter here."""
    from gpumemnet.training import learners
    from gpumemnet.training import published_recipe as published
    from gpumemnet.training.learners import Learner

    monkeypatch.setattr(learners, "LEARNERS", {name: Learner(fit, 2, 2) for name, fit in few_rounds().items()})
    monkeypatch.setattr(published, "learn_published", partial(published.learn_published, rounds=2))


def figures(answers: Answers) -> list[Numbers | Wholes]:
    found = [] if answers.quantiles_mib is None else [answers.quantiles_mib]
    return [*found, *answers.points_mib.values(), *answers.bounds_mib.values(), *answers.classes.values()]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("learner", NAMES)
def test_no_label_of_a_judged_row_reaches_its_answer(learner: str, samples: Samples) -> None:
    split = by_chance(len(samples), seed=0)[0]
    poisoned = samples.footprint_mib.copy()
    poisoned[split.judged] = 7.0  # below every other, so that a scale that sees it moves
    job = Job("mlp", learner, "folds", split, 0)
    honest, other = answer(job, samples), answer(job, Samples(**{**vars(samples), "footprint_mib": poisoned}))
    for mine, its in zip(figures(honest), figures(other), strict=True):
        np.testing.assert_array_equal(mine, its)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("learner", NAMES)
def test_the_same_seed_gives_the_same_numbers(learner: str, samples: Samples) -> None:
    job = Job("mlp", learner, "folds", by_chance(len(samples), seed=0)[0], 3)
    for mine, its in zip(figures(answer(job, samples)), figures(answer(job, samples)), strict=True):
        np.testing.assert_array_equal(mine, its)


def test_labels_that_are_learned_from_do_count(samples: Samples) -> None:
    """Else the two tests above would show nothing."""
    doubled = Samples(**{**vars(samples), "footprint_mib": samples.footprint_mib * 2})
    one, two = (learn(fit_forests, given, 2, 0, 1).quantiles_mib(samples) for given in (samples, doubled))
    assert np.median(two[:, MEDIAN] / one[:, MEDIAN]) > 1.5


def test_two_processes_answer_as_one(samples: Samples) -> None:
    jobs = [Job("mlp", "extra-trees", "folds", split, 0) for split in by_chance(len(samples), seed=0)]
    told: list[str] = []
    found = {answers.job.split.name: answers for answers in compete({"mlp": samples}, jobs, told.append)}
    assert sorted(found) == ["fold 1", "fold 2", "fold 3"]
    assert len(told) == 3
    for job in jobs:
        for mine, its in zip(figures(answer(job, samples)), figures(found[job.split.name]), strict=True):
            np.testing.assert_array_equal(mine, its)


def test_every_row_is_judged_once_and_never_by_a_member_that_learned_from_it(samples: Samples) -> None:
    for splits in (by_chance(len(samples), seed=1), by_shape(samples.shapes)):
        assert sorted(np.concatenate([split.judged for split in splits])) == list(range(len(samples)))
        for split in splits:
            assert not set(split.learned) & set(split.judged)
            assert len(split.learned) + len(split.judged) == len(samples)


def test_a_shape_is_left_out_whole(samples: Samples) -> None:
    splits = by_shape((*samples.shapes[:-1], "rare"))
    assert {split.name for split in splits} == {
        "uniform",
        "pyramid",
        "bottleneck",
    }  # of a rare one a share says nothing
    for split in splits:
        assert split.name not in {samples.shapes[row] for row in split.learned if row < len(samples) - 1}


def test_members_are_asked_about_what_they_have_left_out(samples: Samples) -> None:
    """A member that knows the rows it has seen by heart would look perfect on them."""

    class ByHeart:
        def __init__(self, z: Numbers, rows_of: Sequence[Wholes]) -> None:
            self._z, self._rows_of = z, rows_of

        def z(self, asked: Samples) -> Numbers:
            found = np.full((len(self._rows_of), len(asked), len(QUANTILES)), 5.0)
            for member, rows in enumerate(self._rows_of):
                found[member, rows] = self._z[rows][:, None]
            return found

    def by_heart(_samples: Samples, z: Numbers, rows_of: Sequence[Wholes], _scale: Scale, _seed: int) -> ByHeart:
        return ByHeart(z, rows_of)

    learned = learn(by_heart, samples, 4, 0, 1)
    assert np.abs(learned.unseen_mib[:, MEDIAN] / samples.footprint_mib - 1).mean() > 0.01
    assert (learned.shifts < -1).all()


@pytest.mark.parametrize("level", [0.9, 0.95, 0.99])
def test_a_bound_holds_on_new_rows(level: float) -> None:
    rng = np.random.default_rng(0)
    seen, new = rng.lognormal(0, 0.2, 4_000), rng.lognormal(0, 0.2, 40_000)
    factor = conformal(np.ones(4_000), seen, level)
    assert (new <= factor).mean() == pytest.approx(level, abs=0.01)


def test_of_few_rows_the_largest_miss_is_the_bound() -> None:
    assert conformal(np.ones(5), np.array([1.0, 1.1, 0.9, 1.3, 1.0]), 0.99) == 1.3


def test_quantiles_hold_on_unseen_rows() -> None:
    learned, judged = made(600, seed=1), made(600, seed=2)
    found = learn(fit_forests, learned, 4, 0, 1).quantiles_mib(judged)
    assert (np.diff(found, axis=1) >= 0).all()
    held = (judged.footprint_mib[:, None] <= found).mean(0)
    np.testing.assert_allclose(held, QUANTILES, atol=0.08)


def test_the_operating_point_keeps_under_estimates_few() -> None:
    """Truth is spread evenly around a class's edge, so that the median puts half of the upper ones too low."""
    rng = np.random.default_rng(0)
    middle = rng.uniform(900, 1_100, 4_000)
    truth = middle + rng.normal(0, 20, 4_000)
    spread = np.array([-1.64, -0.67, 0.0, 0.67, 1.28, 1.64, 2.33]) * 20
    quantiles = middle[:, None] + spread
    point = cheapest(quantiles, truth, 1, 0.01)
    found = at_level(quantiles, point)
    assert point > 0.7
    assert ((found < 1_000) & (truth >= 1_000)).mean() <= 0.015
    assert cheapest(quantiles, truth, 1, 0.0) > point
    assert cheapest(quantiles, truth, 1, 1.0) < 0.7  # allowed as many as there are, the median is best
    assert cheapest(np.repeat(truth[:, None], len(QUANTILES), 1), truth, 1, 0.0) == 0.5


def test_between_two_quantiles_lies_a_straight_line() -> None:
    mib = np.array([[10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0]])
    assert at_level(mib, 0.5)[0] == 30.0
    assert at_level(mib, 0.625)[0] == pytest.approx(35.0)
    assert at_level(mib, 0.99)[0] == 70.0
    assert at_level(mib, 0.01)[0] == 10.0
