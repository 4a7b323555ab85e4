"""The estimators' figures, and what becomes of a plugin that misbehaves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import cast

import msgspec
import pytest
from msgspec.structs import replace

from carma import plugins
from carma.core.model.settings import Memory, Rules
from carma.core.model.values import (
    Alone,
    AttemptKey,
    Demand,
    Estimate,
    Gpu,
    GpuId,
    NoEstimate,
    Owner,
    TaskId,
    TaskSpec,
)
from carma.core.ports import EstimateRequest, Estimator, PastRun
from carma.errors import BadSettings, PluginError
from carma.estimate import combination
from carma.estimate.combination import first_answer
from carma.estimate.declared import Declared
from carma.estimate.history import SURVIVED_S, History
from carma.store.memory import MemoryStore
from carma.testing.estimator_contract import FixedEstimator
from carma.trial.protocol import Context

A100 = Gpu(id=GpuId("GPU-0"), index=0, name="A100", memory_mib=40_960)
SPEC = TaskSpec(command=("python", "train.py", "--batch", "64"), directory="/home/alice")
REQUEST = EstimateRequest(task=TaskId(100), owner=Owner(1001, 1001, "alice"), spec=SPEC, gpus=(A100,))
RUN = PastRun(
    key=AttemptKey(TaskId(1), 1),
    uid=1001,
    command=SPEC.command,
    directory=SPEC.directory,
    gpus=1,
    gpu_model="A100",
    peak_mib=4_000,
    runtime_s=100.0,
    succeeded=True,
    collocated=False,
    ended_at=1.0,
)


def history(*changes: Mapping[str, object], request: EstimateRequest = REQUEST) -> Estimate | NoEstimate:
    archive = MemoryStore()
    for number, change in enumerate(changes, start=1):
        key = AttemptKey(TaskId(number), 1)
        archive.remember(msgspec.structs.replace(RUN, key=key, ended_at=float(number), **change))
    return History(archive).estimate(request)


def estimated(*changes: Mapping[str, object], request: EstimateRequest = REQUEST) -> Estimate:
    answer = history(*changes, request=request)
    assert isinstance(answer, Estimate), answer
    return answer


def refused(*changes: Mapping[str, object], request: EstimateRequest = REQUEST) -> str:
    answer = history(*changes, request=request)
    assert isinstance(answer, NoEstimate), answer
    return answer.reason


def test_the_declared_figure_is_booked_as_it_is() -> None:
    spec = msgspec.structs.replace(SPEC, gpu_memory_mib=12_288)
    answer = Declared().estimate(msgspec.structs.replace(REQUEST, spec=spec))
    assert answer == Estimate(footprint_mib=12_288, upper_mib=12_288, source="declared")


def test_without_a_declared_figure_there_is_no_guess() -> None:
    answer = Declared().estimate(REQUEST)
    assert isinstance(answer, NoEstimate)
    assert "--gpu-mem" in answer.reason


def test_history_books_the_most_seen_and_at_least_256_mib_more() -> None:
    answer = estimated({"peak_mib": 3_000}, {"peak_mib": 4_000}, {"peak_mib": 3_500})
    assert (answer.footprint_mib, answer.upper_mib) == (4_000, 4_256)
    assert answer.source == "history"
    assert answer.gpu_model == "A100"
    assert answer.warnings == ()


def test_history_books_five_percent_more_where_that_is_more() -> None:
    assert estimated({"peak_mib": 20_000}).upper_mib == 21_000


def test_history_takes_the_median_run_time_of_runs_that_had_the_gpu_alone() -> None:
    runs = [{"runtime_s": seconds} for seconds in (90.0, 100.0, 140.0)]
    assert estimated(*runs, {"runtime_s": 500.0, "collocated": True}).runtime_s == 100.0
    assert estimated({"runtime_s": 500.0, "collocated": True}).runtime_s == 500.0


def test_history_takes_what_shared_runs_would_have_taken_alone() -> None:
    slowed = {"runtime_s": 500.0, "collocated": True, "alone": _alone(0.3, pace=0.8)}
    assert estimated(slowed).runtime_s == 400.0
    assert estimated(slowed, {"runtime_s": 450.0}).runtime_s == 450.0, "one that was alone counts for more"
    kept = {"runtime_s": 500.0, "alone": _alone(0.3, pace=0.8)}
    assert estimated(kept).runtime_s == 500.0, "alone, a pace below 1 is a prediction of nothing"


def test_history_tells_what_it_keeps_busy_by_runs_that_were_alone_where_there_are_any() -> None:
    shared = [{"collocated": True, "alone": _alone(part)} for part in (0.9, 0.1, 0.4)]
    assert estimated(*shared).demand == _alone(0.4).demand, "the one in the middle"
    assert estimated(*shared, {"alone": _alone(0.2)}).demand == _alone(0.2).demand
    assert estimated({}).demand is None


def _alone(part: float, pace: float = 1.0) -> Alone:
    return Alone(demand=Demand(part, part / 2, part / 4, part), pace=pace)


def test_history_is_for_the_same_user_directory_and_whole_command() -> None:
    assert "not run" in refused({"uid": 1002}, {"directory": "/home/alice/x"}, {"command": SPEC.command[:2]})
    other = msgspec.structs.replace(SPEC, command=("python", "train.py", "--batch", "128"))
    assert "not run" in refused({}, request=msgspec.structs.replace(REQUEST, spec=other))


def test_history_prefers_the_servers_gpu_model() -> None:
    answer = estimated({"peak_mib": 9_000, "gpu_model": "T4"}, {"peak_mib": 4_000})
    assert (answer.footprint_mib, answer.gpu_model) == (4_000, "A100")
    elsewhere = estimated({"peak_mib": 9_000, "gpu_model": "T4"})
    assert elsewhere.footprint_mib == 9_000
    assert "T4" in elsewhere.warnings[0]


def test_history_prefers_the_same_number_of_gpus() -> None:
    assert estimated({"peak_mib": 9_000, "gpus": 2}, {"peak_mib": 4_000}).footprint_mib == 4_000
    assert "number of GPUs" in estimated({"gpus": 2}).warnings[0]


def test_history_prefers_runs_that_succeeded() -> None:
    failed = {"peak_mib": 9_000, "succeeded": False, "runtime_s": 10 * SURVIVED_S}
    assert estimated(failed, {"peak_mib": 4_000}).footprint_mib == 4_000
    answer = estimated(failed)
    assert answer.footprint_mib == 9_000
    assert answer.runtime_s is None
    assert "did not succeed" in answer.warnings[0]


def test_history_does_not_trust_a_run_that_ended_at_once_or_was_not_measured() -> None:
    assert "ended early" in refused({"succeeded": False, "runtime_s": SURVIVED_S / 2})
    assert "not seen" in refused({"peak_mib": None}, {"peak_mib": 0})


class Plugin:
    """An estimator from elsewhere, as bad as `act` makes it."""

    name = "plugin"
    quick = False

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def estimate(self, request: EstimateRequest) -> Estimate | NoEstimate:
        assert request is REQUEST
        return cast(Estimate, self._act())


def raising() -> object:
    raise RuntimeError("no CUDA here")


GOOD = Estimate(footprint_mib=5, upper_mib=6, source="good")


def test_the_first_answer_counts_and_the_refusals_before_it_are_kept() -> None:
    later = FixedEstimator(Estimate(footprint_mib=7, upper_mib=8, source="later"))
    no = NoEstimate(source="no", reason="never ran")
    estimate, refusals = first_answer([FixedEstimator(no), FixedEstimator(GOOD), later], REQUEST)
    assert estimate is not None
    assert (estimate.source, estimate.upper_mib, refusals) == ("good", 6, (no,))
    assert first_answer([FixedEstimator(no)], REQUEST) == (None, (no,))
    assert first_answer([], REQUEST) == (None, ())


@pytest.mark.parametrize(
    ("act", "finding"),
    [
        (raising, "RuntimeError: no CUDA here"),
        (lambda: None, "NoneType"),
        (lambda: 4_000, "int"),
        (lambda: Estimate(footprint_mib=9, upper_mib=8, source="x"), "cannot be booked"),
        (lambda: Estimate(footprint_mib=0, upper_mib=0, source="x"), "cannot be booked"),
        (lambda: Estimate(footprint_mib=-4, upper_mib=8, source="x"), "cannot be booked"),
        (lambda: Estimate(footprint_mib=math.nan, upper_mib=8, source="x"), "footprint_mib"),  # type: ignore[arg-type]
        (lambda: Estimate(footprint_mib=1.5, upper_mib=8, source="x"), "footprint_mib"),  # type: ignore[arg-type]
        (lambda: Estimate(footprint_mib=1, upper_mib=1 << 70, source="x"), "it raised"),
    ],
)
def test_a_plugin_that_misbehaves_is_a_refusal_that_names_it(act: Callable[[], object], finding: str) -> None:
    estimate, refusals = first_answer([Plugin(act), FixedEstimator(GOOD)], REQUEST)
    assert estimate is not None
    assert estimate.source == "good"
    (refusal,) = refusals
    assert refusal.source == "plugin"
    assert finding in refusal.reason


def test_a_figure_that_is_not_a_number_is_absent() -> None:
    odd = Estimate(footprint_mib=5, upper_mib=6, source="odd", runtime_s=math.nan, level=math.inf)
    estimate, _ = first_answer([FixedEstimator(odd)], REQUEST)
    assert estimate is not None
    assert (estimate.runtime_s, estimate.level) == (None, None)


def test_the_time_is_measured_here_whatever_the_plugin_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([100.0, 100.25])
    monkeypatch.setattr("carma.estimate.combination.time.monotonic", lambda: next(ticks))
    estimate, _ = first_answer([FixedEstimator(msgspec.structs.replace(GOOD, seconds=999.0))], REQUEST)
    assert estimate is not None
    assert estimate.seconds == 0.25


def context(*sources: str) -> Context:
    return Context(archive=MemoryStore(), gpus=(A100,), rules=Rules(memory=Memory(sources=sources)))


def test_the_settings_say_who_is_asked_and_in_which_order() -> None:
    assert [estimator.name for estimator in combination.make_estimators(context("history", "declared"))] == [
        "history",
        "declared",
    ]
    assert combination.make_estimators(context()) == ()


def test_what_history_saw_wins_over_what_was_predicted_and_a_prediction_over_nothing() -> None:
    predicted = replace(GOOD, demand=Demand(0.9, 0.4, 0.3), demand_predicted=True, runtime_s=None)
    seen = replace(GOOD, demand=Demand(0.2, 0.1, 0.1), demand_predicted=False, runtime_s=90.0)
    nothing = replace(GOOD, demand=None, demand_predicted=False, runtime_s=90.0)

    class Quick(FixedEstimator):
        quick = True

    def told(*said: Estimate) -> tuple[Demand | None, bool, float | None]:
        answer, _ = first_answer([Quick(one) for one in said], REQUEST)
        assert answer is not None
        return answer.demand, answer.demand_predicted, answer.runtime_s

    assert told(predicted, seen) == (seen.demand, False, 90.0)
    assert told(predicted, nothing) == (predicted.demand, True, 90.0)
    assert told(nothing, predicted) == (predicted.demand, True, 90.0)
    assert told(seen, predicted) == (seen.demand, False, 90.0)


def test_a_source_that_knows_no_rate_alone_leaves_the_one_that_is_known() -> None:
    known, nothing = replace(GOOD, alone_steps_per_s=8.0), replace(GOOD, runtime_s=90.0)
    later = replace(GOOD, runtime_s=90.0, alone_steps_per_s=5.0)

    class Quick(FixedEstimator):
        quick = True

    def rate_of(*answers: Estimate) -> float | None:
        answer, _ = first_answer([Quick(one) for one in answers], REQUEST)
        assert answer is not None
        return answer.alone_steps_per_s

    assert rate_of(known, nothing) == rate_of(known, later) == 8.0
    assert rate_of(GOOD, later) == 5.0


def test_an_unknown_source_stops_the_start() -> None:
    with pytest.raises(BadSettings, match="'histroy'"):
        combination.make_estimators(context("declared", "histroy"))


@pytest.mark.parametrize(
    ("factory", "finding"),
    [
        (lambda _context: raising(), "RuntimeError: no CUDA here"),
        (lambda _context: object(), "no method"),
        ("not a function", "is a str"),
    ],
)
def test_a_factory_that_misbehaves_is_named(monkeypatch: pytest.MonkeyPatch, factory: object, finding: str) -> None:
    monkeypatch.setattr(combination, "load_one", lambda _group, _name: factory)
    with pytest.raises(PluginError, match="'mine'") as caught:
        combination.make_estimators(context("mine"))
    assert finding in str(caught.value)


def test_an_estimator_is_what_the_port_says() -> None:
    made: list[Estimator] = [Declared(), History(MemoryStore()), FixedEstimator(GOOD)]
    assert [estimator.name for estimator in made] == ["declared", "history", "good"]
    assert plugins.ESTIMATORS == "carma.estimators"
