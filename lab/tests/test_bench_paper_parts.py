"""The pieces of `carma bench paper`: variants, traces, windows, means, and when a curve is below a point."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from carma.config import settings_of
from carma.errors import Usage
from carma.plugins import POLICIES, names
from carma.traces import Trace
from carma_lab.bench.paper import cases, workloads
from carma_lab.bench.paper.cases import Case, Limit, Results, geo_mean
from carma_lab.bench.paper.curves import below
from carma_lab.bench.paper.published import PUBLISHED
from carma_lab.bench.paper.variants import (
    ABLATIONS,
    BASELINES,
    DEFAULT_CAP,
    EXCLUSIVE,
    MORE,
    NO_CAP,
    OURS,
    STRICT,
    capped,
)
from carma_lab.simulator import estimate_sources as sources
from carma_lab.traces.writer import write

EVERY = (EXCLUSIVE, *BASELINES, *ABLATIONS, *STRICT, *OURS, *MORE)
CURVE = [(1.05, 0.8), (1.2, 0.7), (1.4, 0.65)]


@pytest.mark.parametrize("one", EVERY, ids=lambda one: one.name)
def test_every_variant_can_be_simulated(one: object) -> None:
    assert isinstance(one, type(EXCLUSIVE))
    assert one.policy in names(POLICIES)
    assert one.memory in sources.NAMES
    settings_of(dict(one.settings))


def test_every_published_figure_has_a_variant_beside_it() -> None:
    assert set(PUBLISHED) == {one.name for one in STRICT}


def test_the_strict_variants_keep_the_order_of_arrival_and_a_gpu_for_what_has_no_estimate() -> None:
    rules = {one.name: settings_of(dict(one.settings)).rules for one in STRICT}
    assert all(found.placement.tasks_per_gpu > 15 for found in rules.values()), "published: no limit"
    assert all(found.queue.backfill_depth == 0 for found in rules.values())
    assert rules["MAGM, Fake Tensor's memory"].memory.unknown_mib == 40_000
    assert rules["MAGM, no estimate"].memory.unknown_mib == 5_120  # published, too


def test_each_variant_has_its_published_gate() -> None:
    gates = [settings_of(dict(one.settings)).rules.gate for one in (BASELINES[0], ABLATIONS[3], ABLATIONS[4])]
    assert [(gate.sm_active, gate.sm_occupancy, gate.dram_active, gate.combine) for gate in gates] == [
        (0.8, 0.45, 0.4, "published"),
        (0.65, 0.35, 0.5, "published"),
        (0.5, 0.2, 0.4, "published"),
    ]


def test_the_default_cap_is_plain_goodput_and_none_is_no_cap() -> None:
    assert capped(DEFAULT_CAP) == OURS[1]
    assert capped(NO_CAP).name == "goodput, no cap"
    assert settings_of(dict(capped(1.5).settings)).rules.placement.slowdown_cap == 1.5


@pytest.mark.parametrize(
    ("point", "verdict"),
    [
        ((1.2, 0.71), True),  # at a cap, above the curve
        ((1.2, 0.70), False),  # on it is not below
        ((1.125, 0.76), True),  # between two caps the line counts: 0.75 there
        ((1.125, 0.74), False),
        ((2.0, 0.66), True),  # right of its end its lowest makespan counts
        ((2.0, 0.64), False),
        ((1.0, 1.0), None),  # left of it there is nothing to compare
    ],
)
def test_a_curve_lies_below_a_point(point: tuple[float, float], verdict: bool | None) -> None:
    assert below(CURVE, point) is verdict
    assert below(CURVE[::-1], point) is verdict


def test_a_mean_of_what_is_not_known_is_not_known() -> None:
    assert geo_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert geo_mean([0.5, None]) is None
    assert geo_mean([]) is None


def test_a_trace_is_brought_to_a_load() -> None:
    trace = workloads.at_load(workloads.generated(50, 8, seed=1), 8, 3.0)
    assert trace.gpu_seconds / (8 * trace.tasks[-1].arrival_s) == pytest.approx(3.0, rel=1e-4)


def test_windows_do_not_overlap_and_belong_to_the_seed() -> None:
    whole = workloads.generated(200, 4, seed=2)
    marked = Trace(name="whole", tasks=whole.tasks)
    first = workloads.windows(marked, 4, 30, 4, seed=7)
    assert first == workloads.windows(marked, 4, 30, 4, seed=7)
    assert first != workloads.windows(marked, 4, 30, 4, seed=8)
    assert list(first) == ["philly-1-4", "philly-2-4", "philly-3-4", "philly-4-4"]
    for cut in first.values():
        assert len(cut.tasks) == 30
        assert cut.tasks[0].arrival_s == 0.0


def test_too_many_windows_are_refused() -> None:
    with pytest.raises(Usage, match="3 windows of 30"):
        workloads.windows(workloads.generated(60, 4, seed=2), 3, 30, 4, seed=0)


def test_the_public_file_and_an_imported_one_are_both_taken(tmp_path: Path) -> None:
    raw = tmp_path / "philly.csv"
    jobs = [f"2017-10-09 07:{place:02}:00,{100 + place},{1 + place % 8},{place},c" for place in range(40)]
    raw.write_text("timestamp,duration,num_gpus,gpu_time,cluster\n" + "\n".join(jobs) + "\n")
    found = workloads.philly(raw)
    assert len(found.tasks) == 20  # eight numbers of GPUs in turn, four of them are taken
    imported = tmp_path / "imported.csv"
    write(found, imported)
    assert workloads.philly(imported).tasks == found.tasks
    assert {task.gpus for task in workloads.philly(imported, 2).tasks} == {1, 2}


def test_a_case_is_simulated_once_and_processes_change_nothing() -> None:
    said: list[str] = []
    traces = {"small": workloads.generated(12, 2, seed=3)}
    cases, limit = [Case(EXCLUSIVE, "small", 2), Case(BASELINES[0], "small", 2)], Limit("small", 2)
    asks: list[Case | Limit] = [*cases, limit]
    results = Results(1, said.append)
    results.find([*asks, *asks], traces)
    results.find(asks, traces)
    assert len(said) == 3
    several = Results(2, said.append)
    several.find(asks, traces)
    for case in cases:
        assert several.row(case).makespan_s == results.row(case).makespan_s
    assert several.limit(limit) == results.limit(limit)


SAYS = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getsignal(2) == 0)"


def said_by(program: str) -> list[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()


def test_a_process_of_the_study_hears_ctrl_c_once_it_has_begun_and_then_ends_without_a_word() -> None:
    """While it is imported it would print a traceback; so it is started deaf."""
    with cases._uninterrupted():
        blocked, _ = said_by(SAYS)
        assert blocked == "True"
        assert said_by(f"from carma_lab.bench.paper.cases import _begin; _begin({{}}); {SAYS}") == ["False", "True"]
    assert said_by(SAYS)[0] == "False"


def test_ctrl_c_ends_all_processes_without_a_traceback(tmp_path: Path) -> None:
    """A terminal sends it to each of them."""
    words = ["bench", "paper", "--quick", "--parallel", "2", "--only", "tables", "--out", str(tmp_path / "out")]
    with subprocess.Popen(
        [sys.executable, "-m", "carma", *words], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "tables:\n"
        os.killpg(process.pid, signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 130
    assert "Traceback" not in rest
    assert not (tmp_path / "out" / "README.md").exists()
