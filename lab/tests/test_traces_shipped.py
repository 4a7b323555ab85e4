"""The shipped traces are the published ones: shapes, work and an exclusive run agree with what is derived from them."""

from __future__ import annotations

import heapq
import statistics
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from carma.errors import BadTrace
from carma.traces import SHIPPED, Trace, find, read
from carma.traces.schema import COLUMNS
from carma.traces.table import parse_table, read_table, shipped_table
from carma_lab.simulator.simulated_cards import A100_40
from carma_lab.traces.task_classes import CLASSES, class_of
from carma_lab.traces.writer import write, write_table
from lab.tools import published as publishing

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "traces.md"


class Anchor(NamedTuple):
    """Derived from the published files. Waits and completions are means, of strict FIFO on four exclusive GPUs."""

    tasks: int
    cifar: int
    mnist: int
    two_gpus: int
    last_s: int
    gap_median_s: int
    gap_mean_s: int
    gap_most_s: int
    names: int
    gpu_h: float
    makespan_h: float
    wait_min: int
    completion_min: int


ANCHORS = {
    "t1": Anchor(60, 32, 0, 3, 13_767, 184, 233, 600, 38, 29.3, 7.70, 123, 149),
    "t2": Anchor(60, 28, 0, 3, 18_601, 286, 315, 816, 36, 34.7, 9.67, 93, 124),
    "mix": Anchor(90, 55, 1, 6, 12_514, 88, 141, 589, 37, 46.3, 12.02, 197, 224),
    "heavy": Anchor(60, 0, 7, 3, 8_966, 88, 152, 589, 22, 38.0, 9.92, 210, 245),
}


def _exclusive(trace: Trace, gpus: int = 4) -> list[tuple[float, float]]:
    """Start and end of each task: in order of arrival, without overtaking, one task at a time on each GPU."""
    free_at = [0.0] * gpus
    ran: list[tuple[float, float]] = []
    for task in trace.tasks:
        taken = [heapq.heappop(free_at) for _ in range(task.gpus)]
        start = max(task.arrival_s, *taken, ran[-1][0] if ran else 0.0)
        ran.append((start, start + task.seconds))
        for _ in taken:
            heapq.heappush(free_at, start + task.seconds)
    return ran


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shape_is_the_published_one(name: str) -> None:
    trace, anchor = find(name), ANCHORS[name]
    gaps = [after.arrival_s - before.arrival_s for before, after in pairwise(trace.tasks)]
    assert len(trace.tasks) == anchor.tasks
    assert sum("cifar" in task.name for task in trace.tasks) == anchor.cifar
    assert sum(task.name == "mnist_train" for task in trace.tasks) == anchor.mnist
    assert sum(task.gpus == 2 for task in trace.tasks) == anchor.two_gpus
    assert trace.tasks[-1].arrival_s == anchor.last_s
    assert statistics.median(gaps) == pytest.approx(anchor.gap_median_s, abs=0.5)
    assert statistics.mean(gaps) == pytest.approx(anchor.gap_mean_s, abs=0.5)
    assert max(gaps) == anchor.gap_most_s
    assert len({task.name for task in trace.tasks}) == anchor.names


@pytest.mark.parametrize("name", SHIPPED)
def test_work_and_an_exclusive_run_agree_with_the_published_figures(name: str) -> None:
    trace, anchor = find(name), ANCHORS[name]
    ran = _exclusive(trace)
    waits = [start - task.arrival_s for task, (start, _) in zip(trace.tasks, ran, strict=True)]
    completions = [end - task.arrival_s for task, (_, end) in zip(trace.tasks, ran, strict=True)]
    assert trace.gpu_seconds / 3600 == pytest.approx(anchor.gpu_h, abs=0.05)
    assert max(end for _, end in ran) / 3600 == pytest.approx(anchor.makespan_h, abs=0.005)
    assert statistics.mean(waits) / 60 == pytest.approx(anchor.wait_min, abs=0.5)
    assert statistics.mean(completions) / 60 == pytest.approx(anchor.completion_min, abs=0.5)


@pytest.mark.parametrize("name", SHIPPED)
def test_the_page_has_these_figures(name: str) -> None:
    trace = find(name)
    ran = _exclusive(trace)
    wait_s = statistics.mean(start - task.arrival_s for task, (start, _) in zip(trace.tasks, ran, strict=True))
    cells = [
        name,
        str(len(trace.tasks)),
        str(sum(task.gpus == 2 for task in trace.tasks)),
        f"{trace.tasks[-1].arrival_s:,.0f} s",
        f"{trace.gpu_seconds / 3600:.1f}",
        f"{max(end for _, end in ran) / 3600:.2f} h",
        f"{wait_s / 60:.0f} min",
    ]
    assert f"| {' | '.join(cells)} |" in PAGE.read_text(encoding="utf-8").splitlines()


def test_the_page_has_the_table_of_columns() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    for column in COLUMNS:
        unit = f" {column.unit} " if column.unit else " "
        meaning = column.meaning if column.required else f"optional: {column.meaning}"
        assert f"| `{column.name}` |{unit}| {meaning} |" in lines


@pytest.mark.parametrize("name", ["mix", "heavy"])
def test_the_page_has_the_shares_of_classes(name: str) -> None:
    counts = Counter(class_of(task) for task in find(name).tasks)
    light, medium, heavy = (round(100 * counts[kind] / len(find(name).tasks)) for kind in CLASSES)
    told = {
        "mix": f"{light} % light, {medium} % medium and {heavy} % heavy",
        "heavy": f"{light}, {medium} and {heavy} %",
    }
    assert told[name] in " ".join(PAGE.read_text(encoding="utf-8").split())


def test_known_slips_of_the_published_files_are_put_right() -> None:
    tasks = shipped_table().tasks
    assert tasks["xlnet_base_cased_2"].seconds == pytest.approx(7.3802 * 8 * 60, abs=1)  # minutes are for an epoch
    assert tasks["xlnet_large_cased_2"].seconds == pytest.approx(19.5789 * 3 * 60, abs=1)
    assert tasks["efficientNet_cifar100_20e_1"].seconds == pytest.approx(1.4212 * 20 * 60, abs=1)
    for model in ("resnet18", "resnet34"):  # named for 50 epochs, run 20
        assert tasks[f"{model}_cifar100_50e_3"].seconds == tasks[f"{model}_cifar100_20e_3"].seconds
    assert tasks["efficientNet_cifar100_20e_3"].memory_mib == 866
    assert tasks["resnet34_cifar100_20e_3"].memory_mib == 1074
    batches = {name: tasks[name].batch for name in ("UNet", "maskrcnn", "xlnet_large_cased_2", "mnist_train", "dlrm")}
    assert batches == {"UNet": 8, "maskrcnn": 8, "xlnet_large_cased_2": 4, "mnist_train": 64, "dlrm": 32_768}
    assert tasks["mnist_train"].seconds == 180
    assert "gpt2_xl" not in tasks


def test_no_estimate_is_none_and_not_a_number_that_stands_for_it() -> None:
    tasks = shipped_table().tasks.values()
    estimates = [(task.horus_mib, task.faketensor_mib, task.gpumemnet_mib) for task in tasks]
    assert 40_000 not in {estimate for each in estimates for estimate in each}
    assert shipped_table().tasks["dlrm"].horus_mib is None
    assert shipped_table().tasks["BERT_base"].faketensor_mib is None
    assert shipped_table().tasks["BERT_base"].horus_mib == 17_457  # 17,456.9: rounded up
    assert all(gpumemnet is None or gpumemnet % 8_000 == 0 for _, _, gpumemnet in estimates)


def test_each_task_says_what_it_trains() -> None:
    for task in shipped_table().tasks.values():
        assert task.model
        assert task.batch > 0
        assert task.sm_occupancy <= task.sm_active


@pytest.mark.parametrize("name", SHIPPED)
def test_the_source_is_named(name: str) -> None:
    source = find(name).source
    assert "itu-rad/CARMA, commit e044017" in source
    assert "mnist_train has no published time: 3 minutes are assumed" in source


def test_the_shipped_demands_are_the_published_ones() -> None:
    """Those of each task alone on an A100, as restated in lab/results/a100/solo.csv."""
    solo = publishing.read(ROOT / publishing.SOLO)
    for task in shipped_table().tasks.values():
        theirs = solo[task.name]
        for figure in ("sm_active", "sm_occupancy", "dram_active", "gr_active"):
            assert getattr(task, figure) == pytest.approx(theirs.figures[figure], abs=0.0006)
        assert task.power == pytest.approx(A100_40.share_of(theirs.figures["power_w"]), abs=0.0006)
        assert task.start_s == pytest.approx(theirs.start_s, abs=0.06)
        assert (task.gpus, task.working_gpus) == (theirs.gpus, theirs.busy_gpus)
        assert task.start_s + 2 * task.ramp_s < task.seconds


def test_only_xlnet_leaves_a_gpu_idle() -> None:
    idle = {name for name, task in shipped_table().tasks.items() if task.working_gpus < task.gpus}
    assert idle == {"xlnet_base_cased_2", "xlnet_large_cased_2"}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_trace_can_be_written_with_whole_rows(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.csv"
    write(find(name), path)
    assert read(path) == find(name)


def test_the_table_is_written_as_it_is_shipped(tmp_path: Path) -> None:
    """New demands for all traces are one file: read, replaced, written."""
    table = shipped_table()
    path = tmp_path / "tasks.csv"
    write_table(table, path)
    assert read_table(path) == table
    busier = {name: msgspec.structs.replace(task, sm_active=0.9, power=0.5) for name, task in table.tasks.items()}
    write_table(msgspec.structs.replace(table, tasks=busier), path)
    assert {(task.sm_active, task.power) for task in read_table(path).tasks.values()} == {(0.9, 0.5)}


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (["arrival_s,name"], "my.csv line 1: this is a trace, and a table of tasks has no column arrival_s"),
        (["name,gpus"], "my.csv line 1: no column memory_mib"),
    ],
)
def test_a_bad_table_says_what_is_wrong(lines: list[str], complaint: str) -> None:
    with pytest.raises(BadTrace) as caught:
        parse_table(lines, "my.csv")
    assert str(caught.value).startswith(complaint)


def test_a_name_may_stand_in_a_table_once() -> None:
    header, row = "name,gpus,memory_mib,seconds,sm_active,sm_occupancy,dram_active", "a,1,100,10,0,0,0"
    with pytest.raises(BadTrace, match=r"^my\.csv line 3: name: a "):
        parse_table([header, row, row], "my.csv")
