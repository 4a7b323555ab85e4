"""Writing a trace: the same bytes for the same trace, and reading them gives the trace back."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from carma.errors import BadTrace
from carma.traces import Trace, TraceTask, parse, read
from carma.traces.schema import COLUMNS
from carma_lab.traces.writer import text, write

NO_CLOCK = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
TASK = TraceTask(
    arrival_s=0.0, name="a", gpus=1, memory_mib=100, seconds=10.0, sm_active=0.5, sm_occupancy=0.2, dram_active=0.3
)
FULL = msgspec.structs.replace(
    TASK,
    arrival_s=0.1,
    name='b, "quoted"',
    gr_active=0.9,
    power=1 / 3,
    start_s=8.25,
    ramp_s=1e-9,
    first_mib=40,
    busy_gpus=1,
    model="resnet50",
    batch=32,
    user="ana",
    priority=-3,
    checkpoint_s=600.0,
    save_s=2.5,
    horus_mib=7904,
    faketensor_mib=2673,
    gpumemnet_mib=16_000,
)

_numbers = some.floats(0, 1e9, allow_nan=False)
_shares = some.floats(0, 1)
_letters = some.characters(codec="utf-8", exclude_categories=("C", "Z"), include_characters=" ")
_printable = some.text(_letters, max_size=8).map(str.strip).filter(str.isprintable)
_known = some.none() | some.integers(1, 10**6)
_tasks = some.builds(
    TraceTask,
    arrival_s=_numbers,
    name=_printable.map(lambda word: f"n{word}"),
    gpus=some.integers(1, 128),
    memory_mib=some.integers(1_000, 10**6),
    seconds=some.floats(1e-3, 1e9),
    sm_active=_shares,
    sm_occupancy=_shares,
    dram_active=_shares,
    gr_active=some.none() | _shares,
    power=some.none() | _shares,
    start_s=_numbers,
    ramp_s=_numbers,
    first_mib=some.integers(0, 1_000),
    busy_gpus=some.sampled_from([0, 1]),
    model=_printable,
    batch=some.integers(0, 10**6),
    user=_printable,
    priority=some.integers(-(10**6), 10**6),
    checkpoint_s=_numbers,
    save_s=some.none() | _numbers,
    horus_mib=_known,
    faketensor_mib=_known,
    gpumemnet_mib=_known,
).filter(lambda task: task.start_s <= task.seconds)  # else no such row can be


@NO_CLOCK
@given(some.lists(_tasks, min_size=1, max_size=5), some.text(some.characters(codec="utf-8")))
def test_what_is_written_is_read_back(tasks: list[TraceTask], source: str) -> None:
    ordered = tuple(sorted(tasks, key=lambda task: task.arrival_s))
    trace = Trace(name="x.csv", tasks=ordered, source=" ".join(source.split()))
    spelled = text(trace)
    assert parse(spelled.splitlines(), "x.csv") == trace
    assert text(parse(spelled.splitlines(), "x.csv")) == spelled


def test_only_columns_with_something_in_them_are_written(tmp_path: Path) -> None:
    plain = Trace(name="t.csv", tasks=(TASK,), source="Made up.")
    path = tmp_path / "t.csv"
    write(plain, path)
    assert path.read_bytes() == (
        b"# Made up.\n"
        b"arrival_s,name,gpus,memory_mib,seconds,sm_active,sm_occupancy,dram_active\n"
        b"0,a,1,100,10,0.5,0.2,0.3\n"
    )
    assert read(path) == plain
    write(Trace(name="t.csv", tasks=(TASK, FULL)), path)
    header, first, second = path.read_text().splitlines()
    assert header == ",".join(column.name for column in COLUMNS)
    assert first == "0,a,1,100,10,0.5,0.2,0.3,,,0,0,0,0,,0,,0,0,,,,"
    assert second == (
        '0.1,"b, ""quoted""",1,100,10,0.5,0.2,0.3,0.9,0.3333333333333333,8.25,1e-09,40,1,resnet50,32,ana,-3,600,2.5,'
        "7904,2673,16000"
    )
    assert read(path).tasks == (TASK, FULL)


def test_every_column_is_a_field_and_required_where_the_field_has_no_default() -> None:
    fields = {field.name: field.required for field in msgspec.structs.fields(TraceTask)}
    assert {column.name: column.required for column in COLUMNS} == fields


def test_a_demand_knows_what_the_row_knows() -> None:
    assert (TASK.demand.gr_active, TASK.demand.power) == (None, None)
    assert (FULL.demand.gr_active, FULL.demand.power) == (0.9, 1 / 3)


def test_long_comments_are_folded_between_words() -> None:
    source = " ".join(["word-with-hyphens"] * 40)
    spelled = text(Trace(name="t.csv", tasks=(TASK,), source=source))
    comments = [line for line in spelled.splitlines() if line.startswith("#")]
    assert len(comments) > 1
    assert max(map(len, comments)) <= 120
    assert parse(spelled.splitlines(), "t.csv").source == source


@pytest.mark.parametrize("name", ["two\nlines", " blank", "bell\a"])
def test_a_text_that_would_come_back_as_another_is_refused(name: str) -> None:
    with pytest.raises(BadTrace, match="cannot be written"):
        text(Trace(name="t.csv", tasks=(msgspec.structs.replace(TASK, name=name),)))


def test_a_trace_without_tasks_is_not_written() -> None:
    with pytest.raises(BadTrace, match="no tasks to write"):
        text(Trace(name="t.csv", tasks=()))


def test_numbers_are_spelled_so_that_nothing_is_lost() -> None:
    for number in (0.1 + 0.2, 1e9 - 1e-6, math.pi, 0.001 + 1e-18, 123456789.0):
        (task,) = parse(
            text(Trace(name="t.csv", tasks=(msgspec.structs.replace(TASK, seconds=number),))).splitlines(), "t.csv"
        ).tasks
        assert task.seconds == number
