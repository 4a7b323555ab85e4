"""Files that results go to: looked at before the work, written whole, never put in the place of something else."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from carma.cli import carma
from carma.errors import Refused, Usage
from carma_lab.reports import drawing
from carma_lab.runs.record import read
from gpumemnet.output_file import check_file, write_file
from tests.harness import LIMIT_S

SMALL = "arrival_s,name,gpus,memory_mib,seconds,sm_active,sm_occupancy,dram_active\n0,short,1,2000,60,0.5,0.2,0.2\n"


@pytest.fixture(autouse=True)
def _with_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.csv").write_text(SMALL)
    monkeypatch.setattr(drawing, "DPI", 20)  # what is drawn is no matter here


def typed(*words: str) -> Result:
    return CliRunner().invoke(carma, list(words))


def simulated(out: str, *more: str) -> Result:
    return typed("simulate", "--trace", "small.csv", "--out", out, *more)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "--out has an empty name"),
        ("there", "there is a directory"),
        ("new/", "new/ names a directory"),
        ("none/run.json", "none/run.json cannot be written: there is no directory none"),
        ("small.csv/run.json", "small.csv/run.json cannot be written: Not a directory"),
        ("n" * 300, "cannot be written: File name too long"),
    ],
)
@pytest.mark.parametrize("verb", ["simulate --trace small.csv", "trace generate --tasks 3"])
def test_what_cannot_be_written_is_refused_before_the_work(
    verb: str, name: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_given: object, **_more: object) -> None:
        raise AssertionError("the work was begun")

    monkeypatch.setattr("carma_lab.simulator.request.simulation", never)
    monkeypatch.setattr("carma_lab.traces.generate.generate", never)
    Path("there").mkdir()
    result = typed(*verb.split(), "--out", name)
    assert result.exit_code == 2
    assert said in result.stderr
    assert sorted(os.listdir()) == ["small.csv", "there"]


def test_the_error_about_an_unwritable_directory_has_the_path_as_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(**_given: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("gpumemnet.directories.tempfile.TemporaryFile", denied)
    with pytest.raises(Usage, match=r"^run\.json cannot be written: Permission denied$"):
        check_file("run.json")


def test_only_a_run_is_written_over_without_force() -> None:
    assert "small.csv exists and is not a run" in simulated("small.csv").stderr
    assert Path("small.csv").read_text() == SMALL
    Path("empty").touch()
    for name in ("empty", "run.json", "run.json"):
        result = simulated(name)
        assert result.exit_code == 0
        assert result.stderr == f"{name}\n"
        assert len(read(Path(name)).tasks) == 1
    Path("other").write_text("precious")
    assert simulated("other", "--force").exit_code == 0
    assert read(Path("other"))


def test_a_real_run_is_not_written_over_by_a_simulated_one() -> None:
    assert simulated("real.json").exit_code == 0
    old = Path("real.json").read_text().replace('"simulated":true', '"simulated":false')
    Path("real.json").write_text(old)
    assert "contains a real run, which a simulation cannot restore" in simulated("real.json").stderr
    assert Path("real.json").read_text() == old
    assert simulated("real.json", "--force").exit_code == 0


@pytest.mark.parametrize("verb", ["run-report run.json", "compare run.json other.json", "trace describe small.csv"])
def test_a_directory_without_a_name_is_not_the_one_that_one_is_in(verb: str) -> None:
    assert simulated("run.json").exit_code == 0
    assert simulated("other.json", "--policy", "exclusive").exit_code == 0
    there = sorted(os.listdir())
    result = typed(*verb.split(), "--out", "")
    assert result.exit_code == 2
    assert "empty name" in result.stderr
    assert sorted(os.listdir()) == there


PAGES_AND_PICTURES = {
    "run-report run.json": ("course.png", "course.svg", "spread.png", "spread.svg", "gantt.png", "gantt.svg"),
    "compare run.json other.json": ("bars.png", "bars.svg"),
    "trace describe small.csv": ("arrivals.png", "durations.png", "memory.png"),
}


@pytest.mark.parametrize("verb", PAGES_AND_PICTURES)
def test_own_pictures_are_replaced_and_other_files_are_not(verb: str) -> None:
    assert simulated("run.json").exit_code == 0
    assert simulated("other.json", "--policy", "exclusive").exit_code == 0
    order = [*verb.split(), "--out", "pictures"]
    for _ in range(2):
        result = typed(*order)
        assert result.exit_code == 0, result.stderr
        assert set(PAGES_AND_PICTURES[verb]) <= set(os.listdir("pictures"))
    drawn = {Path("pictures", name): Path("pictures", name).read_bytes() for name in PAGES_AND_PICTURES[verb]}
    for path, content in drawn.items():
        path.write_text("precious")
        result = typed(*order)
        assert result.exit_code == 2
        assert f"{path} is there and was not made by CARMA" in result.stderr
        assert not result.stdout, "before anything else"
        assert path.read_text() == "precious"
        path.write_bytes(content)
    for path in drawn:
        path.write_text("precious")
    assert typed(*order, "--force").exit_code == 0
    assert {path: path.read_bytes() for path in drawn} == drawn


def test_a_page_does_not_replace_a_run() -> None:
    assert simulated("run.json").exit_code == 0
    before = Path("run.json").read_bytes()
    result = typed("run-report", "run.json", "--html", "run.json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "run.json" in result.stderr
    assert Path("run.json").read_bytes() == before


@pytest.mark.parametrize("verb", ["run-report run.json", "compare run.json other.json"])
def test_an_own_page_is_replaced_and_other_files_are_not(verb: str) -> None:
    assert simulated("run.json").exit_code == 0
    assert simulated("other.json", "--policy", "exclusive").exit_code == 0
    order = [*verb.split(), "--html", "page.html"]
    assert typed(*order).exit_code == 0
    Path("page.html").write_text("<!DOCTYPE html><title>mine</title>")
    result = typed(*order)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "page.html is there and was not made by CARMA" in result.stderr
    assert Path("page.html").read_text() == "<!DOCTYPE html><title>mine</title>"
    assert typed(*order, "--force").exit_code == 0
    assert typed(*order).exit_code == 0


@pytest.mark.parametrize("verb", ["run-report run.json", "compare run.json other.json"])
def test_a_page_on_standard_output_stands_alone(verb: str) -> None:
    assert simulated("run.json").exit_code == 0
    assert simulated("other.json", "--policy", "exclusive").exit_code == 0
    result = typed(*verb.split(), "--html", "-")
    assert result.stdout.startswith("<!DOCTYPE html>")
    assert result.stdout.endswith("</html>\n")
    assert result.stderr == ""
    assert "both write to standard output" in typed(*verb.split(), "--html", "-", "--json").stderr


def test_standard_output_has_the_run_only() -> None:
    result = simulated("-")
    assert json.loads(result.stdout)["about"]["trace"] == "small.csv"
    assert not Path("-").exists()
    assert "both write to standard output" in simulated("-", "--json").stderr


def test_a_link_is_followed_and_rights_stay() -> None:
    assert simulated("run.json").exit_code == 0
    Path("run.json").chmod(0o640)
    Path("link").symlink_to("run.json")
    write_file("link", b"new")
    assert Path("link").is_symlink()
    assert Path("run.json").read_bytes() == b"new"
    assert Path("run.json").stat().st_mode & 0o777 == 0o640
    Path("to-come").symlink_to("made.json")
    write_file("to-come", b"made")
    assert Path("made.json").read_bytes() == b"made"


def test_a_pipe_is_written_to_and_stays() -> None:
    os.mkfifo("pipe")
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(Path("pipe").read_bytes()), daemon=True)
    reader.start()
    check_file("pipe")
    write_file("pipe", b"x" * 200_000)
    reader.join(LIMIT_S)
    assert got == [b"x" * 200_000]
    assert Path("pipe").is_fifo()


@pytest.mark.parametrize(
    "order",
    [
        "simulate --trace small.csv --out old",
        "trace generate --tasks 3 --force --out old",
        "run-report run.json --force --html old",
    ],
)
def test_on_a_full_disk_the_old_file_stays(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert simulated("run.json").exit_code == 0
    old = Path("run.json").read_bytes()
    Path("old").write_bytes(old)

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("gpumemnet.directories.probe", lambda *_: None)
    monkeypatch.setattr("gpumemnet.output_file.probe", lambda *_: None)
    monkeypatch.setattr("gpumemnet.directories.os.fsync", full)
    result = typed(*order.split())
    assert result.exit_code == 1
    assert "carma: old cannot be written: No space left on device" in result.stderr
    assert "hint: The old file, if any, is unchanged" in result.stderr
    assert Path("old").read_bytes() == old
    assert not list(Path().glob("*.part"))


def test_a_full_disk_while_writing_to_a_device_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo("pipe")
    reading = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)

    def full(_descriptor: int, _data: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("gpumemnet.output_file.os.write", full)
    with pytest.raises(Refused, match="pipe cannot be written: No space left on device"):
        write_file("pipe", b"data")
    os.close(reading)


@pytest.mark.parametrize("order", ["trace generate --tasks 3", "simulate --trace small.csv --out -"])
def test_a_full_disk_behind_standard_output_is_an_error_message(order: str) -> None:
    with Path("/dev/full").open("wb") as full:
        words = [sys.executable, "-m", "carma", *order.split()]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "carma: the output cannot be written: No space left on device"


def test_a_trace_in_the_place_of_a_table_of_tasks_is_called_one() -> None:
    assert simulated("run.json").exit_code == 0
    for order in ("simulate --fidelity run.json --solo small.csv", "trace generate --tasks 3 --map small.csv"):
        result = typed(*order.split())
        assert result.exit_code == 2
        assert "small.csv line 1: this is a trace, and a table of tasks has no column arrival_s" in result.stderr
    Path("table.csv").write_text(SMALL.replace("arrival_s", "arrived"))
    result = typed("trace", "generate", "--tasks", "3", "--map", "table.csv")
    assert "'arrived' is not a column of a table of tasks" in result.stderr
    assert "arrival_s" not in result.stderr


def test_a_recorded_run_that_is_not_there_is_made_by_report() -> None:
    assert "hint: carma run-report --save FILE" in typed("simulate", "--fidelity", "nosuch.json").stderr
