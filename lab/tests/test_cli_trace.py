"""`carma trace` as it is typed: files that are written and kept, figures, pictures, refusals with a hint."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import click
import pytest

from carma.cli import main
from carma.cli.verb import Verb
from carma.traces import find, read
from carma_lab.cli.trace import command

PHILLY = """\
timestamp,duration,num_gpus,gpu_time,cluster
2017-10-09 07:00:00,66.0,1,66.0,11cb48
2017-10-09 06:00:00,3000.0,1,3000.0,6214e9
2017-10-09 08:00:00,7000.0,8,56000.0,6214e9

"""


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("philly.csv").write_text(PHILLY)


def test_describe_says_the_published_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "describe", "t1"]) == 0
    said = capsys.readouterr().out
    assert "60, 38 different" in said
    assert "57 on 1 GPU, 3 on 2 GPUs; 29.3 GPU-hours" in said
    assert "over 3.82 h, 15.4 an hour" in said
    assert "median 184 s, mean 233 s" in said
    assert "light 33 (55 %), medium 19 (32 %), heavy 8 (13 %)" in said
    assert "users" not in said


def test_describe_gives_the_figures_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "describe", "mix", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["tasks"], said["two_gpus"], said["gpus"]) == (90, 6, {"1": 84, "2": 6})
    assert said["gpu_hours"] == pytest.approx(46.3, abs=0.05)
    assert said["gaps_s"]["most"] == 589
    assert said["span_s"] == 12_514
    assert said["classes"] == {"light": 56, "medium": 27, "heavy": 7}


def test_describe_one_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "cut", "t1", "--to", "1", "--out", "one.csv"]) == 0
    assert main(["trace", "describe", "one.csv", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["tasks"], said["gaps_s"], said["rate_per_hour"]) == (1, None, None)
    assert main(["trace", "describe", "one.csv", "--plots", "."]) == 0


def test_pictures_are_drawn_and_the_same_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "describe", "heavy", "--out", "a/b"]) == 0
    drawn = capsys.readouterr().err.split()
    assert drawn == ["a/b/arrivals.png", "a/b/durations.png", "a/b/memory.png"]
    assert main(["trace", "describe", "heavy", "--out", "again"]) == 0
    for name in drawn:
        picture = Path(name).read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert picture == (Path("again") / Path(name).name).read_bytes()


def test_without_matplotlib_there_is_a_hint(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["trace", "describe", "t1", "--out", "pictures"]) == 1
    said = capsys.readouterr()
    assert "matplotlib is not installed" in said.err
    assert "pip install matplotlib" in said.err
    assert not Path("pictures").exists()


def test_without_a_file_the_trace_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "cut", "t1", "--from", "1h", "--to", "2h"]) == 0
    said = capsys.readouterr()
    Path("hour.csv").write_text(said.out)
    assert len(read(Path("hour.csv")).tasks) == 12
    assert said.err == "12 tasks, 6.5 GPU-hours, last arrival after 3,483 s\n"


def test_a_file_that_holds_something_else_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    order = ["trace", "generate", "--tasks", "5", "--out", "mine.csv"]
    Path("mine.csv").write_text("precious")
    assert main(order) == 2
    assert "mine.csv exists with other content" in capsys.readouterr().err
    assert Path("mine.csv").read_text() == "precious"
    assert main([*order, "--force"]) == 0
    assert main(order) == 0  # the same bytes again
    assert main([*order, "--seed", "1"]) == 2


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ("scale t1 --length 1e6", "task 1 runs for"),
        ("scale t1 --length 1e-7", "it must be between"),
        ("scale t1 --rate 1e-6", "a trace lasts at most 1,000,000,000 s"),
        ("generate --tasks 5 --rate 1e-6", "a trace lasts at most 1,000,000,000 s"),
    ],
)
def test_a_trace_that_could_not_be_read_again_is_not_made(
    order: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", *order.split(), "--out", "far.csv"]) == 2
    assert said in capsys.readouterr().err
    assert not Path("far.csv").exists()


def test_without_a_command_the_help_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    main(["trace"])
    said = capsys.readouterr()
    assert (said.err + said.out).startswith("Usage: carma trace")
    assert "carma: " not in said.err + said.out
    assert "hint" not in said.err


def test_generate_takes_its_flags() -> None:
    order = "trace generate --tasks 40 --rate 12 --seed 3 --shares 0,1,0 --burst --users 2 --out g.csv"
    assert main(order.split()) == 0
    trace = read(Path("g.csv"))
    assert len(trace.tasks) == 40
    assert trace.source.startswith(
        "Made by: carma trace generate --tasks 40 --rate 12 --seed 3 --shares 0,1,0 --burst --users 2. "
    )
    assert {task.user for task in trace.tasks} == {"user1", "user2"}


def test_tasks_may_be_drawn_from_a_table_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    table = "name,gpus,memory_mib,seconds,sm_active,sm_occupancy,dram_active\nmine,1,500,60,0.1,0.1,0.1\n"
    Path("table.csv").write_text(table)
    order = ["trace", "generate", "--tasks", "3", "--map", "table.csv", "--out", "g.csv"]
    assert main([*order, "--shares", "1,0,0"]) == 0
    assert [task.name for task in read(Path("g.csv")).tasks] == ["mine"] * 3
    assert main([*order, "--shares", "0,0,1", "--force"]) == 2
    assert "table.csv has no heavy task" in capsys.readouterr().err


def test_philly_is_imported(capsys: pytest.CaptureFixture[str]) -> None:
    order = "trace import philly philly.csv --start 2017-10-09 --days 1 --out p.csv"
    assert main(order.split()) == 0
    assert "note: 1 job with more than 4 GPUs was left out (--gpus-most)" in capsys.readouterr().err
    assert [(task.arrival_s, task.seconds, task.user) for task in read(Path("p.csv")).tasks] == [
        (0, 3000, "6214e9"),
        (3600, 66, "11cb48"),
    ]
    assert main(["trace", "import", "philly", "philly.csv", "--tasks", "1", "--durations", "task", "--gpus-most", "8",
                 "--cluster", "11cb48", "--out", "q.csv"]) == 0  # fmt: skip
    (task,) = read(Path("q.csv")).tasks
    assert task.user == "11cb48"
    assert task.seconds != 66


def test_scale_takes_its_flags() -> None:
    assert main(["trace", "scale", "t2", "--rate", "4", "--length", "2", "--tasks", "61", "--out", "s.csv"]) == 0
    scaled, before = read(Path("s.csv")), find("t2")
    assert scaled.tasks[1].arrival_s == before.tasks[1].arrival_s / 4
    assert scaled.tasks[0].seconds == before.tasks[0].seconds * 2
    assert scaled.tasks[60].name == before.tasks[0].name


@pytest.mark.parametrize(
    ("order", "complaint"),
    [
        ("describe t9", "there is no trace 't9'"),
        ("describe none.csv", "none.csv: No such file or directory"),
        ("describe philly.csv", "philly.csv line 1: 'timestamp' is not a column of a trace"),
        ("cut t1 --from 9h", "t1.csv: no task arrives from 32400 s on"),
        ("cut t1 --from 99999999", "no task arrives from 99999999 s on"),
        ("cut t1 --from 99999999", "between 0 and "),
        ("cut t1 --from 9999999999", "'9999999999' is not a number of seconds below 30 years"),
        ("cut t1 --from noon", "'noon' is not a duration"),
        ("generate", "missing option '--tasks'"),
        ("generate --tasks 0", "0 is out of range"),
        ("generate --tasks 5 --rate 0", "0 is out of range"),
        ("generate --tasks 5 --shares 65,35", "'65,35' are not three shares; write light, medium and heavy"),
        ("generate --tasks 5 --shares 0,0,0", "'0,0,0' are not three shares"),
        ("generate --tasks 5 --map none.csv", "none.csv: No such file or directory"),
        (
            "generate --tasks 5 --out no/such/place.csv",
            "no/such/place.csv cannot be written: there is no directory no/such",
        ),
        ("scale t1 --rate nan", "'nan' is not a number"),
        ("import philly none.csv", "none.csv: No such file or directory"),
        ("import philly philly.csv --start soon", "'soon' is not a date; write 2017-10-09"),
        ("import philly philly.csv --days 1 --tasks 2", "--days and --tasks cannot be combined"),
        ("import philly philly.csv --cluster x", "no job matches"),
        ("import slurm philly.csv", "'slurm' is not"),
    ],
)
def test_an_error_says_what_to_do(capsys: pytest.CaptureFixture[str], order: str, complaint: str) -> None:
    assert main(["trace", *order.split()]) != 0
    said = capsys.readouterr()
    assert complaint in said.err
    assert "internal error" not in said.err
    assert said.out == ""


def _inner() -> Mapping[str, click.Command]:
    assert isinstance(command, click.Group)
    return command.commands


@pytest.mark.parametrize("name", [*_inner()])
def test_the_examples_of_the_help_use_flags_that_exist(name: str) -> None:
    inner = _inner()[name]
    flags = {flag for parameter in inner.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    assert isinstance(inner, Verb)
    for example in inner.examples.splitlines():
        words = example.split()
        assert words[:3] == ["carma", "trace", name]
        assert {word for word in words if word.startswith("--")} <= flags
