"""Traces that are made: classes and shares, arrivals by chance, windows, scaling. Same seed, same bytes."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from itertools import pairwise

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from carma.errors import BadTrace
from carma.traces import Trace, TraceTask, find, parse
from carma.traces.table import Table, shipped_table
from carma_lab.traces.generate import Recipe, generate
from carma_lab.traces.task_classes import CLASSES, Shares, Urn, class_of, split
from carma_lab.traces.transform import cut, scale
from carma_lab.traces.writer import text

NO_CLOCK = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
TASK = TraceTask(
    arrival_s=0.0, name="a", gpus=1, memory_mib=1024, seconds=3600.0, sm_active=0.5, sm_occupancy=0.2, dram_active=0.3
)


def _gaps(trace: Trace) -> list[float]:
    return [after.arrival_s - before.arrival_s for before, after in pairwise(trace.tasks)]


@pytest.mark.parametrize(
    ("gpus", "memory_mib", "seconds", "kind"),
    [
        (1, 1024, 3599.0, "light"),
        (1, 1024, 3600.0, "medium"),
        (2, 1024, 1800.0, "medium"),
        (1, 14 * 1024, 3599.0, "medium"),
        (1, 14 * 1024, 3600.0, "heavy"),
        (2, 7 * 1024, 3600.0, "heavy"),
    ],
)
def test_a_class_is_memory_held_over_time(gpus: int, memory_mib: int, seconds: float, kind: str) -> None:
    assert class_of(msgspec.structs.replace(TASK, gpus=gpus, memory_mib=memory_mib, seconds=seconds)) == kind


@pytest.mark.parametrize(
    ("name", "light", "medium", "heavy"), [("mix", 56, 27, 7), ("heavy", 7, 43, 10)], ids=["mix", "heavy"]
)
def test_the_published_traces_have_about_the_published_shares(name: str, light: int, medium: int, heavy: int) -> None:
    """Published: 65, 27 and 8 % of 90; no light ones, 83 and 17 % of 60 (its 7 of MNIST count as medium there)."""
    counts = Counter(class_of(task) for task in find(name).tasks)
    assert counts == {"light": light, "medium": medium, "heavy": heavy}


@NO_CLOCK
@given(some.lists(some.integers(0, 100), min_size=3, max_size=3).filter(any), some.integers(0, 5_000))
def test_shares_are_kept_to_within_one_task(shares: list[int], tasks: int) -> None:
    counts = split(Shares(*shares), tasks)
    assert sum(counts) == tasks
    for count, share in zip(counts, shares, strict=True):
        assert abs(count - share / sum(shares) * tasks) < 1
        assert share or not count


def test_draws_are_of_the_class_and_fit_the_gpus_where_they_can() -> None:
    urn = Urn(shipped_table(), random.Random(0))
    for kind in CLASSES:
        assert {class_of(urn.draw(kind)) for _ in range(50)} == {kind}
        assert {urn.draw(kind, gpus=1).gpus for _ in range(50)} == {1}
    assert {urn.draw("heavy", gpus=4).gpus for _ in range(50)} == {2}
    assert {urn.draw("light", gpus=2).gpus for _ in range(50)} == {1}  # no light one wants several


def test_a_class_that_the_table_does_not_have_is_named() -> None:
    urn = Urn(Table(name="mine.csv", tasks={"a": TASK}), random.Random(0))
    with pytest.raises(BadTrace, match=r"^mine.csv has no heavy task$") as caught:
        urn.draw("heavy")
    assert "--shares" in caught.value.hint


def test_a_generated_trace_has_the_rate_and_the_shares() -> None:
    trace = generate(Recipe(tasks=20_000, rate_per_hour=60.0, users=3, seed=5), shipped_table())
    gaps = _gaps(trace)
    assert len(trace.tasks) == 20_000
    assert trace.tasks[0].arrival_s == 0
    assert statistics.mean(gaps) == pytest.approx(60, rel=0.05)
    assert statistics.median(gaps) == pytest.approx(60 * 0.693, rel=0.05)  # of a Poisson process
    counts = Counter(class_of(task) for task in trace.tasks)
    assert counts == {"light": 13_000, "medium": 5_400, "heavy": 1_600}
    assert {task.user for task in trace.tasks} == {"user1", "user2", "user3"}
    assert trace.source.startswith(
        "Made by: carma trace generate --tasks 20000 --rate 60 --seed 5 --shares 65,27,8 --users 3. "
    )
    assert trace.source.endswith(shipped_table().source)


def test_bursts_keep_the_rate_and_bring_the_gaps_together() -> None:
    gaps = _gaps(generate(Recipe(tasks=20_000, rate_per_hour=60.0, burst=True), shipped_table()))
    assert statistics.mean(gaps) == pytest.approx(60, rel=0.1)
    assert statistics.median(gaps) == pytest.approx(5, rel=0.1)


@pytest.mark.parametrize("burst", [False, True])
def test_the_same_seed_gives_the_same_bytes(burst: bool) -> None:
    recipe = Recipe(tasks=300, rate_per_hour=30.0, seed=7, burst=burst, users=2, shares=Shares(1, 1, 1))
    made = text(generate(recipe, shipped_table()))
    assert made == text(generate(recipe, shipped_table()))
    assert made != text(generate(msgspec.structs.replace(recipe, seed=8), shipped_table()))
    back = parse(made.splitlines(), "generated.csv")
    assert back == generate(recipe, shipped_table())


def test_a_seed_means_the_same_on_every_machine() -> None:
    trace = generate(Recipe(tasks=4, rate_per_hour=30.0, seed=1), shipped_table())
    assert [(task.arrival_s, task.name) for task in trace.tasks] == [
        (0.0, "efficientNet2"),
        (15.057, "resnet34_cifar100_50e_2"),
        (86.686, "resnet34_cifar100_20e_1"),
        (143.976, "efficientNet_cifar100_50e_3"),
    ]


def test_a_cut_begins_at_zero_and_says_what_it_is() -> None:
    part = cut(find("t1"), 3600, 7200)
    whole = [task for task in find("t1").tasks if 3600 <= task.arrival_s < 7200]
    assert [task.name for task in part.tasks] == [task.name for task in whole]
    assert [task.arrival_s for task in part.tasks] == [task.arrival_s - whole[0].arrival_s for task in whole]
    assert part.source.startswith("Made of t1.csv by: carma trace cut --from 3600 --to 7200. Trace t1")


def test_the_ends_of_a_cut_are_from_and_before() -> None:
    trace = Trace(name="x", tasks=tuple(msgspec.structs.replace(TASK, arrival_s=float(at)) for at in (0, 5, 5, 10)))
    assert len(cut(trace, 5, 10).tasks) == 2
    assert len(cut(trace, 5, float("inf")).tasks) == 3
    assert cut(trace, 0, float("inf")).tasks == trace.tasks


def test_a_cut_without_tasks_says_where_they_are() -> None:
    with pytest.raises(BadTrace, match=r"^t1\.csv: .*20000 to 30000") as caught:
        cut(find("t1"), 20_000, 30_000)
    assert "between 0 and 13767 s" in caught.value.hint


def test_scaling_changes_arrivals_and_runs() -> None:
    before, after = find("t1"), scale(find("t1"), rate=2.0, length=0.5)
    assert [task.arrival_s for task in after.tasks] == [task.arrival_s / 2 for task in before.tasks]
    assert [task.seconds for task in after.tasks] == [task.seconds / 2 for task in before.tasks]
    assert after.source.startswith("Made of t1.csv by: carma trace scale --rate 2 --length 0.5 --tasks 60. ")
    assert [task.start_s for task in after.tasks] == [task.start_s for task in before.tasks]
    for task in scale(find("t1"), length=0.01).tasks:  # runs of seconds: start-up is still only a part of them
        assert 0.0 < task.start_s <= 0.5 * task.seconds


def test_scaling_to_more_tasks_keeps_the_rate() -> None:
    before, after = find("t1"), scale(find("t1"), tasks=600)
    assert [task.name for task in after.tasks] == [task.name for task in before.tasks] * 10
    assert statistics.mean(_gaps(after)) == pytest.approx(statistics.mean(_gaps(before)), rel=1e-6)
    assert scale(find("t1"), tasks=7).tasks == before.tasks[:7]
    assert scale(find("t1")).tasks == before.tasks


@NO_CLOCK
@given(some.floats(1e-3, 1e3), some.integers(1, 200))
def test_what_is_scaled_is_a_trace_still(rate: float, tasks: int) -> None:
    made = scale(find("mix"), rate=rate, tasks=tasks)
    assert parse(text(made).splitlines(), made.name) == made
