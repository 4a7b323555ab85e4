"""The plan of what is measured on a GPU: drawn again the same, within its limits, fair when cut short."""

from __future__ import annotations

import ast
import json
import random
import sys
from pathlib import Path

import pytest

from carma.trial.inside import carma_measure as measure
from carma.trial.inside.carma_measure import plan


@pytest.fixture(scope="module")
def quick() -> plan.MeasuringPlan:
    return plan.make_plan(False)


def convolutions(cases: list[plan.Params]) -> list[plan.Params]:
    return [case for case in cases if case["op"] == "convolution"]


def test_the_same_seed_gives_the_same_plan(quick: plan.MeasuringPlan) -> None:
    again = plan.make_plan(False)
    assert again.cases == quick.cases
    assert again.apart == quick.apart
    assert plan.make_plan(False, seed=5).cases != quick.cases


def test_every_convolution_exists_and_fits(quick: plan.MeasuringPlan) -> None:
    for case in convolutions(quick.cases + quick.apart):
        assert min(plan.out_size(case)) >= 1, case
        assert case["cin"] % case["groups"] == 0, case
        assert case["cout"] % case["groups"] == 0, case
        assert plan.tensor_bytes(case) <= plan.TENSOR_BYTES_MAX, case
        assert plan.flops(case) <= plan.FLOPS_MAX, case


def test_searched_choices_stay_apart_from_the_others(quick: plan.MeasuringPlan) -> None:
    assert {case["mode"] for case in convolutions(quick.cases)} == {"default", "deterministic"}
    assert {case["mode"] for case in quick.apart} == {"benchmark"}


def test_the_first_tenth_is_a_fair_sample(quick: plan.MeasuringPlan) -> None:
    first = convolutions(quick.cases[: len(quick.cases) // 10])
    assert {(case["dtype"], case["tf32"]) for case in first} == set(plan.PRECISIONS)
    assert {case["channels_last"] for case in first} == {False, True}
    assert {case["source"] for case in first} >= {*plan.FAMILIES, "random", "transposed"}


def test_no_convolution_is_drawn_twice() -> None:
    drawn = [repr(case) for case in plan.convolutions(random.Random(1), 500)]
    assert len(set(drawn)) == 500


@pytest.mark.parametrize(
    ("transposed", "expected"),
    [(False, [28, 14]), (True, [112, 55])],
)
def test_the_size_that_comes_out(transposed: bool, expected: list[int]) -> None:
    shape = {"size": [56, 28], "kernel": [4, 3], "stride": [2, 2], "padding": [1, 1], "dilation": [1, 1]}
    assert plan.out_size({**shape, "transposed": transposed}) == expected


def test_a_case_too_large_gets_a_smaller_batch_and_an_impossible_one_is_dropped() -> None:
    case = {"n": 512, "cin": 64, "cout": 64, "size": [512, 512], "kernel": [3, 3], "stride": [1, 1], "dtype": "fp32"}
    case.update({"padding": [1, 1], "dilation": [1, 1], "groups": 1, "transposed": False})
    fitted = plan.fit(case)
    assert fitted is not None
    assert fitted["n"] == 8
    assert plan.fit({**case, "size": [1, 1], "padding": [0, 0]}) is None
    assert plan.fit({**case, "cin": 2048, "cout": 2048, "size": [2048, 2048]}) is None


def test_the_package_needs_nothing_but_the_standard_library_and_torch() -> None:
    allowed = sys.stdlib_module_names | {"torch"}
    for file in sorted(Path(str(measure.__file__)).parent.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [str(node.module)]
            assert all(name.split(".")[0] in allowed for name in names), (file.name, names)


def test_rows_of_an_earlier_run_name_their_cases_once(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from carma.trial.inside.carma_measure.command import cases_in

    case = {"op": "convolution", "n": 8, "mode": "default"}
    found = {"direction": "forward", "peak_bytes": 5, "kept_bytes": 1, "out_bytes": 1, "backend": "Cudnn"}
    lines = [
        {"versions": 1},
        {**case, **found},
        {**case, **found, "direction": "dgrad"},
        {**case, "n": 9, "error": "x"},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert cases_in(str(file)) == [case, {**case, "n": 9}]
