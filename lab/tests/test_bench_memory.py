"""Estimators against measured runs: the figures, the bounds on families that were left out, the published models."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from carma.errors import Usage
from carma.trial.replay.bound import LEAST, Score, Scores
from carma_lab.bench.memory import published18
from carma_lab.bench.memory.figures import (
    Row,
    by_estimator,
    by_family,
    left_out_bounds,
    scores_of,
    summarise,
    without_family,
)
from carma_lab.bench.memory.measured import drawn, read_truth

MIB = 1 << 20
SHIPPED = Path(__file__).parents[2] / "lab" / "results" / "h200" / "memory" / "truth.jsonl"


def row(measured: float, estimated: float | None, **more: Any) -> Row:
    told: dict[str, Any] = {"case": "a.0", "family": "a", "estimator": "trace", "took_s": 1.0}
    return Row(**{**told, "measured_mib": measured, "estimated_mib": estimated, **more})


def replayed(family: str, measured: float, figure: float, group: str = "plain") -> Row:
    return row(measured, figure, family=family, replayed_mib=figure, group=group)


def test_errors_are_parts_of_the_measured_value() -> None:
    found = summarise("trace", [row(1000, 1100), row(1000, 960), row(1000, 900), row(1000, 1000), row(1000, None)])
    assert (found.cases, found.answered, found.refused) == (5, 4, 1)
    assert found.error_median == pytest.approx(0.07)  # of 0, 4, 10 and 10 %
    assert found.error_p90 == pytest.approx(0.1)
    assert found.error_worst in (pytest.approx(0.1), pytest.approx(-0.1))
    assert found.under_share == 0.5
    assert found.under_by_5_percent_share == 0.25


def test_the_worst_error_keeps_its_sign() -> None:
    assert summarise("x", [row(100, 130), row(100, 40)]).error_worst == pytest.approx(-0.6)


def test_a_bound_holds_where_the_run_stayed_at_or_below_it() -> None:
    rows = [row(1000, 900, bound_mib=1000), row(1000, 900, bound_mib=999), row(1000, 1000, bound_mib=1300)]
    found = summarise("trace", rows)
    assert found.bound_holds_share == pytest.approx(2 / 3)
    assert found.overbooked_median == pytest.approx(0.0)


def test_without_a_bound_the_estimate_is_what_would_be_booked() -> None:
    found = summarise("horus", [row(1000, 1500), row(1000, 3000), row(1000, None)])
    assert found.bound_holds_share is None
    assert found.overbooked_median == pytest.approx(1.25)


def test_who_never_answers_has_no_figures_but_its_time() -> None:
    found = summarise("llmem", [row(1000, None, refused="no decoder", took_s=3.0)])
    assert (found.answered, found.refused, found.took_median_s) == (0, 1, 3.0)
    assert found.error_median is None


def test_rows_are_summed_up_by_estimator_in_their_order_and_by_family_in_that_of_the_names() -> None:
    rows = [row(1, 1, family="b", estimator="trace"), row(1, 1, family="a", estimator="horus"), row(1, 1, family="b")]
    assert [(one.name, one.cases) for one in by_estimator(rows)] == [("trace", 2), ("horus", 1)]
    assert [(one.name, one.cases) for one in by_family(rows)] == [("a", 1), ("b", 2)]


def test_a_family_is_judged_without_its_own_errors() -> None:
    rows = [replayed("bad", 2000, 1000), *(replayed("good", 1000 + n, 1000) for n in range(8))]
    judged = left_out_bounds(rows, 0.8)
    bad = judged[0]
    assert bad.bound_mib is not None
    assert bad.bound_mib < 1030  # what the others missed by, and not what it missed by itself
    good = judged[1]
    assert good.bound_mib is not None
    assert good.bound_mib > 1900  # of the one score that is left the largest was taken


def test_groups_do_not_mix_and_refusals_stay() -> None:
    rows = [
        replayed("a", 1500, 1000, "conv-strict"),
        replayed("b", 1000, 1000),
        replayed("c", 1000, 1000),
        row(1000, None, refused="no step"),
    ]
    judged = left_out_bounds(rows, 0.5)
    assert judged[1].bound_mib == pytest.approx(1000 * math.exp(LEAST))
    assert judged[3] is rows[3]


def test_scores_are_errors_and_spreads_of_what_was_replayed() -> None:
    rows = [
        replayed("a", 1100, 1000),
        replace(replayed("b", 1000, 1000), spread=0.3),
        row(1000, None, refused="no step"),
    ]
    found = {case.family: case for case in scores_of(rows).cases}
    assert found["a"].score == pytest.approx(math.log(1.1), abs=1e-4)
    assert found["b"].spread == 0.3
    assert len(found) == 2


def test_runs_that_failed_or_made_no_step_are_left_out(tmp_path: Path) -> None:
    whole = {"family": "a", "argv": [], "reserved_peak": 1, "allocated_peak": 1, "footprint_peak": 5 * MIB, "steps": 3}
    lines: list[dict[str, Any]] = [
        {"gpu": "NVIDIA H200", "torch": "2.11", "more": 1},
        {"id": "a.0", **whole, "error": None},
        {"id": "a.1", "family": "a", "argv": [], "error": "RuntimeError"},
        {"id": "a.2", **whole, "error": None, "steps": 0},
        {"id": "a.3", **whole, "error": None, "footprint_peak": None},
        {"id": "a.0", **whole, "error": None, "footprint_peak": 6 * MIB},
    ]
    file = tmp_path / "truth.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    head, runs = read_truth(file)
    assert head.gpu == "NVIDIA H200"
    assert [(run.id, run.footprint_mib) for run in runs] == [("a.0", 6.0)]


@pytest.mark.parametrize("text", ["", "not json", '{"gpu": null}'])
def test_a_file_without_runs_is_an_error(text: str, tmp_path: Path) -> None:
    file = tmp_path / "truth.jsonl"
    file.write_text(text)
    with pytest.raises(Usage, match=r"truth\.jsonl"):
        read_truth(file)


def test_the_shipped_truth_is_large_enough_and_whole() -> None:
    head, runs = read_truth(SHIPPED)
    assert (head.gpu, head.torch, head.driver) == ("NVIDIA H200", "2.11.0+cu130", "580.159.04")
    assert len(runs) == 677
    assert len({run.family for run in runs}) == 63
    for run in runs:
        assert run.allocated_peak <= run.reserved_peak <= run.footprint_peak


def test_a_seed_draws_the_same_runs_again() -> None:
    runs = read_truth(SHIPPED)[1]
    assert drawn(runs, 5, 1) == drawn(tuple(reversed(runs)), 5, 1)
    assert drawn(runs, 5, 1) != drawn(runs, 5, 2)
    assert sorted(run.id for run in drawn(runs, 0, 1)) == sorted(run.id for run in runs)


def test_the_published_figures_come_to_what_was_worked_out_from_them() -> None:
    """Mean errors as recomputed from the authors' own data."""
    found = {off.name: off for off in published18.errors({}) if off.against == "measured"}
    assert {name: (off.models, round(off.mean_mib), off.under) for name, off in found.items()} == {
        "GPUMemNet": (18, 6426, 2),
        "Fake Tensor": (12, 5306, 12),
        "Horus": (18, 13070, 10),
    }


def test_our_answers_about_the_published_models_are_counted_where_there_are_some() -> None:
    one = published18.PUBLISHED[0]
    ours = replace(row(one.measured_mib, one.measured_mib - 22), case=one.run.id)
    found = {off.against: off for off in published18.errors({ours.case: ours}) if off.name == "ours"}
    assert (found["measured"].models, found["measured"].mean_mib, found["measured"].under) == (1, 22, 1)
    assert found["measured later"].mean_mib == one.measured_mib - 22 - 6684


def test_every_published_model_is_one_that_the_script_has() -> None:
    from carma_lab.bench.memory.zoo.published import options

    for one in published18.PUBLISHED:
        args = options().parse_args(list(one.run.argv))
        assert (args.model, args.batch) == (one.model, one.batch)
    assert len({one.run.id for one in published18.PUBLISHED}) == 18


def test_a_family_can_be_left_out() -> None:
    known = Scores(cases=tuple(Score(f"family{number % 7}", "plain", 0.1) for number in range(50)))
    assert {case.family for case in without_family(known, "family3").cases} == {
        f"family{n}" for n in range(7) if n != 3
    }
