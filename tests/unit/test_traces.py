"""The trace format: what is read, and what each kind of bad file is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from carma.errors import BadTrace
from carma.traces import SHIPPED, find, parse, read

HEADER = "arrival_s,name,gpus,memory_mib,seconds,sm_active,sm_occupancy,dram_active"
GOOD = "0,resnet,1,3934,2097,0.5,0.22,0.3"


def test_a_row_becomes_a_task_and_comments_become_the_source() -> None:
    trace = parse(["# From a paper.", "# Restated.", HEADER, GOOD, "7.5,bert,2,12622,2696,0.7,0.28,0.37"], "x.csv")
    first, second = trace.tasks
    assert (first.arrival_s, first.name, first.gpus, first.memory_mib, first.seconds) == (0, "resnet", 1, 3934, 2097)
    assert (second.demand.sm_active, second.demand.sm_occupancy, second.demand.dram_active) == (0.7, 0.28, 0.37)
    assert second.arrival_s == 7.5
    assert (first.start_s, first.ramp_s) == (0, 0)
    assert trace.source == "From a paper. Restated."
    assert trace.gpu_seconds == 2097 + 2 * 2696


def test_columns_may_stand_in_any_order_and_optional_ones_are_read() -> None:
    header = "name,ramp_s,start_s,arrival_s,gpus,memory_mib,seconds,dram_active,sm_occupancy,sm_active"
    (task,) = parse([header, '"a, b",3,8,0,1,100,10,0.1,0.2,0.3'], "x.csv").tasks
    assert (task.name, task.ramp_s, task.start_s) == ("a, b", 3, 8)
    assert (task.dram_active, task.sm_occupancy, task.sm_active) == (0.1, 0.2, 0.3)


def test_blank_lines_are_skipped_and_still_counted() -> None:
    with pytest.raises(BadTrace, match=r"^t1\.csv line 7: memory_mib: 'abc' is not a number$"):
        parse(["# a", "", HEADER, GOOD, "", GOOD, "9,vgg,1,abc,10,0,0,0"], "t1.csv")


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("x,a,1,100,10,0,0,0", "line 2: arrival_s: 'x' is not a number"),
        ("nan,a,1,100,10,0,0,0", "line 2: arrival_s: 'nan' is not a number of 0 or more"),
        ("-1,a,1,100,10,0,0,0", "line 2: arrival_s: '-1' is not a number of 0 or more"),
        ("0,,1,100,10,0,0,0", "line 2: name: a task needs a name"),
        ("0,a,0,100,10,0,0,0", "line 2: gpus: must be above 0"),
        ("0,a,1.5,100,10,0,0,0", "line 2: gpus: 1.5 is not a whole number"),
        ("0,a,1,100,0,0,0,0", "line 2: seconds: must be above 0"),
        ("0,a,1,100,10,1.2,0,0", "line 2: sm_active: 1.2 is above 1; it is a share from 0 to 1"),
        ("0,a,1,100,10,0,0", "line 2: 7 values for 8 columns"),
        ('0,"a,1,100,10,0,0,0', "line 2: not a CSV row"),
    ],
)
def test_a_bad_value_is_named_with_line_and_column(row: str, complaint: str) -> None:
    with pytest.raises(BadTrace) as caught:
        parse([HEADER, row], "my.csv")
    assert str(caught.value).startswith(f"my.csv {complaint}")


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([], "my.csv: no header line"),
        (["# only words"], "my.csv: no header line"),
        ([HEADER], "my.csv: no task below the header"),
        ([HEADER + ",colour", GOOD + ",red"], "my.csv line 1: 'colour' is not a column of a trace"),
        ([HEADER + ",gpus", GOOD + ",1"], "my.csv line 1: a column is there twice"),
        (["arrival_s,name,gpus", "0,a,1"], "my.csv line 1: no column memory_mib, seconds, sm_active"),
        ([HEADER, "5" + GOOD[1:], GOOD], "my.csv line 3: arrival_s: 0 is before the row above it"),
    ],
)
def test_a_bad_file_says_what_is_wrong(lines: list[str], complaint: str) -> None:
    with pytest.raises(BadTrace) as caught:
        parse(lines, "my.csv")
    assert str(caught.value).startswith(complaint)


def test_files_that_are_missing_or_binary_are_told_apart(tmp_path: Path) -> None:
    binary = tmp_path / "b.csv"
    binary.write_bytes(b"\x00\xff\xfe")
    with pytest.raises(BadTrace, match="not a text file"):
        read(binary)
    with pytest.raises(BadTrace, match="No such file"):
        read(tmp_path / "none.csv")
    with pytest.raises(BadTrace, match="Is a directory"):
        read(tmp_path)
    with pytest.raises(BadTrace, match="no such trace") as caught:
        find("t7")
    assert "t1" in caught.value.hint


def test_a_path_is_found_as_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(f"{HEADER}\n{GOOD}\n")
    assert find(str(path)).tasks[0].name == "resnet"


def test_the_shipped_trace_is_the_published_one() -> None:
    """Anchors derived from the published files: 60 tasks, 32 on CIFAR, 3 on two GPUs, 29.3 GPU-hours in 13,767 s."""
    trace = find("t1")
    assert SHIPPED == ("t1",)
    assert len(trace.tasks) == 60
    assert sum("cifar" in task.name for task in trace.tasks) == 32
    assert sum(task.gpus == 2 for task in trace.tasks) == 3
    assert trace.tasks[-1].arrival_s == 13_767
    assert trace.gpu_seconds / 3600 == pytest.approx(29.3, abs=0.05)
    assert "itu-rad/CARMA" in trace.source
    assert "ASSUMPTIONS" in trace.source


def test_the_shipped_demands_match_published_exclusive_runs() -> None:
    """Weighted by GPU time: what busy GPUs of an exclusive run would show, inside the published ranges."""
    trace = find("t1")
    weights = [task.gpus * task.seconds for task in trace.tasks]

    def average(values: list[float]) -> float:
        return sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)

    assert 0.42 <= average([task.sm_active for task in trace.tasks]) <= 0.61
    assert 0.19 <= average([task.sm_occupancy for task in trace.tasks]) <= 0.27
    assert 0.25 <= average([task.dram_active for task in trace.tasks]) <= 0.27
    assert all(task.sm_occupancy <= task.sm_active for task in trace.tasks)
