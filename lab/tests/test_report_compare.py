"""Runs side by side: what tells them apart, ratios, means over traces, tasks that differ."""

from __future__ import annotations

import pytest

from carma.errors import Usage
from carma_lab.reports.compare import compare, geo_mean, variants
from carma_lab.reports.pages import changes, overall, side_by_side
from carma_lab.runs.record import Run
from lab_fixtures.recorded_runs import about, run, task


def ran(trace: str, policy: str, seconds: float, energy_j: float | None = None) -> Run:
    return run(task(1, 0.0, 0.0, seconds), of=about(trace=trace, policy=policy), energy_j=energy_j)


def test_runs_are_called_by_their_policy_and_by_what_else_differs() -> None:
    plain = about()
    assert variants([plain, about(policy="lug")]) == ["magm", "lug"]
    assert variants([plain, about(memory="none")]) == ["magm, memory measured", "magm, memory none"]
    assert variants([plain, about(trace="other")]) == ["magm", "magm"]
    assert variants([plain, about(seed=1)]) == ["magm, seed 0", "magm, seed 1"]
    assert variants([plain, about(settings={"gate.enabled": "no"})]) == ["magm", "magm, gate.enabled no"]
    real = about(simulated=False, memory="")
    assert variants([real, plain]) == ["magm, real", "magm, simulated, memory measured"]


def test_the_first_is_one() -> None:
    found = compare([ran("t", "exclusive", 200.0, energy_j=10.0), ran("t", "magm", 100.0, energy_j=8.0)])
    assert found.variants == ("exclusive", "magm")
    assert found.ratios["t"]["exclusive"]["makespan_s"] == 1.0
    assert found.ratios["t"]["magm"]["makespan_s"] == 0.5
    assert found.ratios["t"]["magm"]["energy_j"] == pytest.approx(0.8)
    assert found.ratios["t"]["magm"]["sm_active_mean"] is None
    assert "ooms" not in found.ratios["t"]["magm"]
    head, first, *_ = side_by_side(found, "t")
    assert head == ["t", "exclusive", "magm", "ratio"]
    assert first == ["makespan", "03:20", "01:40", "0.500"]


def test_over_traces_ratios_have_a_geometric_mean_and_counts_a_sum() -> None:
    runs = [ran("a", "one", 100.0), ran("a", "two", 50.0), ran("b", "one", 100.0), ran("b", "two", 200.0)]
    found = compare(runs)
    assert found.traces == ("a", "b")
    assert found.overall["two"]["makespan_s"] == pytest.approx(1.0)
    assert found.overall["two"]["ooms"] == 0
    assert overall(found)[1] == ["makespan", "1.000", "1.000"]
    assert overall(found)[0] == ["2 traces", "one", "two"]


def test_a_variant_without_a_trace_has_no_mean() -> None:
    found = compare([ran("a", "one", 100.0), ran("b", "one", 100.0), ran("a", "two", 50.0)])
    assert found.overall["two"]["makespan_s"] is None
    assert found.overall["two"]["ooms"] is None
    assert found.overall["one"]["makespan_s"] == pytest.approx(1.0)


def test_geometric_means() -> None:
    assert geo_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert geo_mean([0.5, None]) is None
    assert geo_mean([]) is None


def test_what_cannot_be_compared_is_refused_with_a_hint() -> None:
    with pytest.raises(Usage, match="no run of b under one") as caught:
        compare([ran("a", "one", 100.0), ran("b", "two", 100.0)])
    assert "simulate b under one" in caught.value.hint
    with pytest.raises(Usage, match="same settings"):
        compare([ran("a", "one", 100.0), ran("a", "one", 100.0)])
    with pytest.raises(Usage, match="2 traces"):
        compare([ran("a", "one", 100.0), ran("b", "one", 100.0)])


def test_tasks_that_differ_most_are_matched_by_name_and_arrival() -> None:
    first = run(
        task(1, 0.0, 0.0, 100.0, name="same"),
        task(2, 5.0, 5.0, 105.0, name="same"),
        task(3, 9.0, 9.0, 19.0, name="only here"),
        of=about(policy="one"),
    )
    other = run(task(11, 1.0, 1.0, 91.0, name="same"), task(12, 6.0, 206.0, 306.0, name="same"), of=about(policy="two"))
    found = compare([first, other])
    assert [(one.task, one.completion_s, one.other_completion_s) for one in found.tasks] == [
        (2, 100.0, 300.0),
        (1, 100.0, 90.0),
    ]
    assert changes(found)[1] == ["2 same", "two", "05:00", "01:40", "03:20", "0 s"]


def test_traces_that_only_share_their_name_are_not_compared() -> None:
    one = run(task(1, 0.0, 0.0, 10.0), of=about(policy="exclusive", tasks="aaaa"))
    for tasks, fine in (("aaaa", True), ("", True), ("bbbb", False)):
        other = run(task(1, 0.0, 0.0, 10.0), of=about(tasks=tasks))
        if fine:
            assert compare([one, other]).variants == ("exclusive", "magm")
        else:
            with pytest.raises(Usage, match="different tasks"):
                compare([one, other])
