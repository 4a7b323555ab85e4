"""The trace format: the values that are read, and the error for each kind of invalid file."""

from __future__ import annotations

from pathlib import Path

import pytest

from carma.errors import BadTrace
from carma.traces import find, parse, read

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


def test_empty_cells_are_unknown_and_missing_columns_have_defaults() -> None:
    header = f"{HEADER},gr_active,power,model,batch,user,priority,first_mib,horus_mib,faketensor_mib,gpumemnet_mib"
    known, not_known = parse([header, f"{GOOD},0.9,0.4,resnet50,32,ana,-2,500,7904,2673,16000", GOOD + ",,,,0,,0,0,,,"],
                             "x.csv").tasks  # fmt: skip
    assert (known.gr_active, known.power, known.model, known.batch, known.user) == (0.9, 0.4, "resnet50", 32, "ana")
    assert (known.priority, known.first_mib) == (-2, 500)
    assert (known.horus_mib, known.faketensor_mib, known.gpumemnet_mib) == (7904, 2673, 16_000)
    assert not_known == parse([HEADER, GOOD], "x.csv").tasks[0]
    assert (not_known.gr_active, not_known.power, not_known.horus_mib, not_known.model) == (None, None, None, "")


@pytest.mark.parametrize(
    ("column", "text", "complaint"),
    [
        ("batch", "", "batch: is empty"),
        ("priority", "", "priority: is empty"),
        ("start_s", "", "start_s: is empty"),
        ("priority", "1.5", "priority: 1.5 is not a whole number"),
        ("priority", "inf", "priority: 'inf' is not a number"),
        ("power", "1.01", "power: 1.01 is above 1; it is a share from 0 to 1"),
        ("gr_active", "-0.1", "gr_active: '-0.1' is not a number of 0 or more"),
        ("horus_mib", "0", "horus_mib: must be above 0"),
        ("gpumemnet_mib", "none", "gpumemnet_mib: 'none' is not a number"),
        ("first_mib", "3935", "first_mib: 3935 is above memory_mib, 3934"),
        ("busy_gpus", "2", "busy_gpus: 2 is above gpus, 1"),
        ("start_s", "2098", "start_s: 2,098 is above seconds, 2,097"),
        ("user", "a\0b", "user: the text contains a zero byte"),
    ],
)
def test_a_bad_optional_value_is_named_with_line_and_column(column: str, text: str, complaint: str) -> None:
    with pytest.raises(BadTrace) as caught:
        parse([f"{HEADER},{column}", f"{GOOD},{text}"], "my.csv")
    assert str(caught.value) == f"my.csv line 2: {complaint}"


@pytest.mark.parametrize("column", ["arrival_s", "gpus", "memory_mib", "seconds", "sm_active"])
def test_a_required_cell_must_not_be_empty(column: str) -> None:
    row = dict(zip(HEADER.split(","), GOOD.split(","), strict=True)) | {column: ""}
    with pytest.raises(BadTrace, match=f"^my.csv line 2: {column}: is empty$"):
        parse([HEADER, ",".join(row.values())], "my.csv")


def test_a_file_that_a_spreadsheet_has_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sheet.csv"
    path.write_bytes(b"\xef\xbb\xbf" + f"{HEADER}\r\n{GOOD}\r\n".encode())
    assert read(path).tasks[0].name == "resnet"


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
        ("1e15,a,1,100,10,0,0,0", "line 2: arrival_s: 1e15 is above 1,000,000,000 seconds"),
        ("0,a,1,100,1e308,0,0,0", "line 2: seconds: 1e308 is above 1,000,000,000 seconds"),
        ("0,a,1,100,1e-300,0,0,0", "line 2: seconds: 1e-300 is below 0.001"),
        ("0,a,1,1e300,10,0,0,0", "line 2: memory_mib: 1e300 is too large"),
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
        ([HEADER + ",gpus", GOOD + ",1"], "my.csv line 1: a column occurs twice"),
        (["arrival_s,name,gpus", "0,a,1"], "my.csv line 1: no column memory_mib, seconds, sm_active"),
        ([HEADER, "5" + GOOD[1:], GOOD], "my.csv line 3: arrival_s: 0 is earlier than in the row above"),
    ],
)
def test_the_error_of_a_bad_file_names_the_place_and_the_mistake(lines: list[str], complaint: str) -> None:
    with pytest.raises(BadTrace) as caught:
        parse(lines, "my.csv")
    assert str(caught.value).startswith(complaint)


def test_missing_files_directories_and_binary_files_have_different_errors(tmp_path: Path) -> None:
    binary = tmp_path / "b.csv"
    binary.write_bytes(b"\x00\xff\xfe")
    with pytest.raises(BadTrace, match="not a text file"):
        read(binary)
    with pytest.raises(BadTrace, match="No such file"):
        read(tmp_path / "none.csv")
    with pytest.raises(BadTrace, match="Is a directory"):
        read(tmp_path)
    with pytest.raises(BadTrace, match="there is no trace") as caught:
        find("t7")
    with pytest.raises(BadTrace, match="there is no trace ''"):
        find("")
    assert "t1" in caught.value.hint


def test_a_path_is_found_as_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(f"{HEADER}\n{GOOD}\n")
    assert find(str(path)).tasks[0].name == "resnet"
