"""The Philly file: the values read, the jobs in a window, the tasks that they become, the error for an invalid row."""

from __future__ import annotations

import datetime
from collections import Counter
from pathlib import Path

import pytest

from carma.errors import BadTrace
from carma.traces.table import shipped_table
from carma_lab.traces.philly import MapRules, Window, import_philly, read_jobs
from carma_lab.traces.task_classes import Shares, class_of
from carma_lab.traces.writer import text

HEADER = "timestamp,duration,num_gpus,gpu_time,cluster"
# Not in order, with an empty line at the end, as the public file.
JOBS = """\
2017-10-09 07:00:00,66.0,1,66.0,11cb48
2017-10-08 06:00:00,3000.0,1,3000.0,6214e9
2017-10-09 08:00:00,7000.0,2,14000.0,6214e9
2017-10-09 07:00:00,90.0,1,90.0,6214e9
2017-10-10 07:30:00,500.0,8,4000.0,11cb48
2017-10-11 07:30:00,86000.0,1,86000.0,6214e9

"""


@pytest.fixture
def philly(tmp_path: Path) -> Path:
    path = tmp_path / "philly.csv"
    path.write_text(f"{HEADER}\n{JOBS}")
    return path


def _import(path: Path, window: Window = Window(), rules: MapRules = MapRules()) -> list[tuple[float, float, int, str]]:
    tasks = import_philly(path, window, rules, shipped_table()).trace.tasks
    return [(task.arrival_s, task.seconds, task.gpus, task.user) for task in tasks]


def test_jobs_come_in_order_of_arrival_and_keep_what_is_theirs(philly: Path) -> None:
    assert _import(philly) == [
        (0, 3000, 1, "6214e9"),
        (90_000, 66, 1, "11cb48"),
        (90_000, 90, 1, "6214e9"),
        (93_600, 7000, 2, "6214e9"),
        (264_600, 86_000, 1, "6214e9"),
    ]
    assert import_philly(philly, Window(), MapRules(), shipped_table()).dropped == 1


@pytest.mark.parametrize(
    ("window", "seconds", "dropped"),
    [
        (Window(start=datetime.datetime(2017, 10, 9)), [66, 90, 7000, 86_000], 1),
        (Window(start=datetime.datetime(2017, 10, 9), days=1), [66, 90, 7000], 0),
        (Window(start=datetime.datetime(2017, 10, 9, 7), days=1 / 24), [66, 90], 0),
        (Window(tasks=2), [3000, 66], 0),
        (Window(start=datetime.datetime(2017, 10, 9), tasks=4), [66, 90, 7000, 86_000], 1),
        (Window(cluster="6214e9"), [3000, 90, 7000, 86_000], 0),
        (Window(gpus_most=8), [3000, 66, 90, 7000, 500, 86_000], 0),
        (Window(gpus_most=1), [3000, 66, 90, 86_000], 2),
    ],
)
def test_a_window_has_the_jobs_that_are_asked_for(
    philly: Path, window: Window, seconds: list[float], dropped: int
) -> None:
    made = import_philly(philly, window, MapRules(), shipped_table())
    assert [task.seconds for task in made.trace.tasks] == seconds
    assert made.trace.tasks[0].arrival_s == 0
    assert made.dropped == dropped
    assert all(0.0 < task.start_s <= 0.5 * task.seconds and task.working_gpus <= task.gpus for task in made.trace.tasks)


def test_a_window_without_jobs_says_what_there_is(philly: Path) -> None:
    with pytest.raises(BadTrace, match="no job matches") as caught:
        _import(philly, Window(cluster="nobody"))
    assert "from 2017-10-08 06:00:00 to 2017-10-11 07:30:00" in caught.value.hint
    assert "6214e9 (4), 11cb48 (2)" in caught.value.hint


def _many(tmp_path: Path, count: int = 200) -> Path:
    path = tmp_path / "many.csv"
    day = datetime.datetime(2017, 10, 9)
    rows = [
        f"{day + datetime.timedelta(seconds=at)},{(at * 7919) % 997 + 1}.0,{1 + (at % 10 == 0)},0,c{at % 3}"
        for at in range(count)
    ]
    path.write_text("\n".join([HEADER, *rows, "", ""]))
    return path


def test_the_shortest_jobs_become_light_tasks_and_the_longest_heavy_ones(tmp_path: Path) -> None:
    path = _many(tmp_path)
    shipped = shipped_table()
    tasks = import_philly(path, Window(), MapRules(shares=Shares(50, 30, 20)), shipped).trace.tasks
    ranked = sorted(tasks, key=lambda task: task.seconds)
    kinds = [class_of(shipped.tasks[task.name]) for task in ranked]
    assert kinds == ["light"] * 100 + ["medium"] * 60 + ["heavy"] * 40
    heavy = [task for task in ranked[160:] if task.gpus == 2]
    assert heavy
    assert {shipped.tasks[task.name].gpus for task in heavy} == {2}


def test_run_times_may_be_those_of_the_tasks(tmp_path: Path) -> None:
    path = _many(tmp_path)
    shipped = shipped_table()
    tasks = import_philly(path, Window(), MapRules(durations="task"), shipped).trace.tasks
    assert all(task.seconds == shipped.tasks[task.name].seconds for task in tasks)
    assert Counter(task.gpus for task in tasks) == {1: 180, 2: 20}
    ours = import_philly(path, Window(), MapRules(), shipped).trace.tasks
    assert [task.name for task in tasks] == [task.name for task in ours]


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    path = _many(tmp_path)
    made = [text(import_philly(path, Window(), MapRules(seed=seed), shipped_table()).trace) for seed in (3, 3, 4)]
    assert made[0] == made[1] != made[2]


def test_the_source_names_the_command_the_paper_and_the_licence(philly: Path) -> None:
    window = Window(start=datetime.datetime(2017, 10, 9), days=2.5, cluster="11cb48", gpus_most=8)
    source = import_philly(philly, window, MapRules(seed=2), shipped_table()).trace.source
    assert source.startswith(
        "Made by: carma trace import philly philly.csv --start 2017-10-09T00:00:00 --days 2.5 --cluster 11cb48 "
        "--gpus-most 8 --shares 65,27,8 --durations philly --seed 2. "
    )
    assert "ATC'19" in source
    assert "CC-BY-4.0" in source


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("2017-10-09,66.0,1", "3 values for 5 columns"),
        ("yesterday,66.0,1,66.0,a", "timestamp: 'yesterday' is not a time like 2017-10-09 07:01:55"),
        ("2017-10-09 07:00:00+02:00,66.0,1,66.0,a", "timestamp: '2017-10-09 07:00:00+02:00' is not a time"),
        ("2017-10-09 07:00:00,-1,1,66.0,a", "duration: '-1' is not a number above 0"),
        ("2017-10-09 07:00:00,nan,1,66.0,a", "duration: 'nan' is not a number above 0"),
        ("2017-10-09 07:00:00,,1,66.0,a", "duration: '' is not a number above 0"),
        ("2017-10-09 07:00:00,66.0,0,66.0,a", "num_gpus: '0' is not a number above 0"),
        ("2017-10-09 07:00:00,66.0,1.5,66.0,a", "num_gpus: 1.5 is not a whole number"),
    ],
)
def test_a_bad_row_names_its_line(tmp_path: Path, row: str, complaint: str) -> None:
    path = tmp_path / "philly.csv"
    path.write_text(f"{HEADER}\n2017-10-09 07:00:00,66.0,1,66.0,a\n\n{row}\n")
    with pytest.raises(BadTrace) as caught:
        read_jobs(path)
    assert str(caught.value).startswith(f"philly.csv line 4: {complaint}")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "philly.csv has no jobs"),
        (f"{HEADER}\n\n", "philly.csv has no jobs"),
        ("when,who\n1,2\n", "philly.csv line 1: no column timestamp, duration, num_gpus, cluster"),
    ],
)
def test_a_file_of_another_kind_is_recognised(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "philly.csv"
    path.write_text(content)
    with pytest.raises(BadTrace) as caught:
        read_jobs(path)
    assert str(caught.value) == complaint
    assert "timestamp" in caught.value.hint
