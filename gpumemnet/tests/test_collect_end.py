"""How `carma dataset collect` ends, and which process may write to a directory: both halves as real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from test_collect_program import LIMIT_S, Place, is_alive, mlp, wait_for

from carma.cli import main
from gpumemnet.dataset import collect, torch_interpreter
from gpumemnet.dataset.torch_interpreter import environment

FOUND = sys.executable
# `carma` with the tests' own driver in place of inside/collect.py; looking for torch would import it.
OUTER = """
import sys
from pathlib import Path
from carma.cli import main
from gpumemnet.dataset import collect, torch_interpreter
collect.MAIN = Path(sys.argv[1])
found = sys.executable
torch_interpreter.find_torch = lambda *_, **__: found
sys.exit(main(["dataset", "collect", *sys.argv[2:], "--device", "cpu"]))
"""


class Outer:
    """Both halves over one directory; ends what it started."""

    def __init__(self, place: Place, capsys: pytest.CaptureFixture[str]) -> None:
        self.place, self.capsys = place, capsys
        self.started: list[subprocess.Popen[str]] = []

    def write(self, *configs: dict[str, Any]) -> None:
        self.place.write(configs)

    def start(self, *words: str) -> subprocess.Popen[str]:
        place = self.place
        command = [sys.executable, "-c", OUTER, str(place.driver), str(place.configs), "--out", str(place.out), *words]
        env = {**environment(), "MARKS": str(place.marks), "HANG": str(place.hang)}
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.started.append(process)
        return process

    def run(self, *words: str) -> tuple[int, str, str]:
        """In this process, without limits of time."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collect, "MAIN", self.place.driver)
            patch.setattr(torch_interpreter, "find_torch", lambda *_, **__: FOUND)
            patch.setenv("MARKS", str(self.place.marks))
            patch.setenv("HANG", str(self.place.hang))
            code = main(["dataset", "collect", str(self.place.configs), "--out", str(self.place.out), *words,
                         "--device", "cpu"])  # fmt: skip
        return code, *self.capsys.readouterr()

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()


@pytest.fixture
def outer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Outer]:
    made = Outer(Place(tmp_path), capsys)
    yield made
    made.end()
    for _, _, pid in made.place.marked("hangs"):
        if is_alive(pid):  # left behind: what is tested here
            os.kill(parent_of(pid), signal.SIGTERM)


@pytest.fixture
def hanging(outer: Outer) -> tuple[subprocess.Popen[str], list[int]]:
    """One that has two runs under way; and the processes behind it: the inner half, and its forks."""
    outer.place.hang.touch()
    outer.write(mlp("a", shape="hangs"), mlp("b", shape="hangs"))
    process = outer.start("--parallel", "2")
    wait_for(lambda: len(outer.place.marked("hangs")) == 2)
    forks = [pid for _, _, pid in outer.place.marked("hangs")]
    return process, [parent_of(forks[0]), *forks]


def parent_of(pid: int) -> int:
    found = re.search(r"^PPid:\s*(\d+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def ended(processes: Sequence[int]) -> bool:
    return not any(is_alive(pid) for pid in processes)


@pytest.mark.parametrize(
    ("how", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_no_process_trains_after_it_has_ended(
    outer: Outer, hanging: tuple[subprocess.Popen[str], list[int]], how: signal.Signals, code: int
) -> None:
    process, behind = hanging
    assert not ended(behind)
    process.send_signal(how)
    _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code, said
    wait_for(lambda: ended(behind))
    if how != signal.SIGKILL:
        (line,) = [line for line in said.splitlines() if "runs are done" not in line]
        assert line.startswith("carma: note: stopped; what was measured is in ")
        assert line.endswith("rows.jsonl, and the same command goes on from there")
    outer.place.hang.unlink()
    code, _, said = outer.run()
    assert code == 0, said
    assert set(outer.place.rows()) == {"a", "b"}


def test_the_inner_half_ends_if_its_parent_has_ended_already(outer: Outer) -> None:
    outer.write(mlp("a"))
    process = outer.place.start("--parent", "1")
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert not outer.place.out.exists()


def test_a_second_collector_of_a_directory_is_refused_and_learns_the_first_process(
    outer: Outer, hanging: tuple[subprocess.Popen[str], list[int]]
) -> None:
    process, _ = hanging
    rows = (outer.place.out / "rows.jsonl").read_text()
    code, _, said = outer.run("--no-resume")
    assert code == 1
    assert f"out is in use: process {process.pid} collects into it" in said
    alone = outer.place.start()  # the inner half by itself
    said, _ = alone.communicate(timeout=LIMIT_S)
    assert (alone.returncode, f"process {process.pid} collects into it" in said) == (1, True)
    assert (outer.place.out / "rows.jsonl").read_text() == rows
    assert not (outer.place.out / "rows.jsonl.old").exists()


def test_no_other_process_may_write_while_the_inner_half_still_does(outer: Outer) -> None:
    """As for a moment after the outer half was killed."""
    outer.place.hang.touch()
    outer.write(mlp("a", shape="hangs"))
    inner = outer.place.start()
    wait_for(lambda: outer.place.marked("hangs"))
    code, _, said = outer.run()
    assert (code, f"process {inner.pid} collects into it" in said) == (1, True)
    inner.send_signal(signal.SIGTERM)
    inner.communicate(timeout=LIMIT_S)
    outer.place.hang.unlink()
    assert outer.run()[0] == 0


def test_the_exit_code_is_1_if_all_runs_failed(outer: Outer) -> None:
    outer.write(mlp("a", shape="broken"), mlp("b", shape="broken"), mlp("c", shape="broken"))
    code, out, said = outer.run()
    assert code == 1
    assert "3 times: ValueError: no such thing" in out
    assert "3 of 3 runs failed, not for want of memory, 3 times so: ValueError: no such thing" in said
    assert "--no-resume" in said


def test_the_exit_code_is_1_if_most_runs_failed(outer: Outer) -> None:
    outer.write(mlp("a"), mlp("b", shape="broken"), mlp("c", shape="broken"))
    code, out, said = outer.run("--json")
    assert (code, json.loads(out)["measured"]) == (1, 1)
    assert "2 of 3 runs failed, not for want of memory, 2 times so: ValueError: no such thing" in said


def test_runs_out_of_memory_are_results(outer: Outer) -> None:
    outer.write(mlp("a", shape="oom"), mlp("b", shape="oom"), mlp("c", shape="broken"))
    code, _, said = outer.run()
    assert code == 0, said


def test_a_run_over_its_limit_is_reported_with_the_limit(outer: Outer) -> None:
    outer.place.hang.touch()
    outer.write(mlp("a", shape="hangs"))
    code, out, said = outer.run("--run-limit", "3s")
    assert code == 1
    assert "once: it took more than 3 s (running)" in out
    assert "1 of 1 runs failed, not for want of memory, once so: it took more than 3 s (running)" in said
    assert "--run-limit" in said


def test_a_run_limit_of_zero_is_refused(outer: Outer) -> None:
    outer.write(mlp("a"))
    code, _, said = outer.run("--run-limit", "0")
    assert (code, "leaves a run no time" in said) == (2, True), said


def test_the_exit_code_is_0_if_some_runs_failed(outer: Outer) -> None:
    outer.write(mlp("a"), mlp("b", shape="broken"))
    code, _, said = outer.run()
    assert code == 0, said


def test_the_exit_code_is_1_if_no_run_was_measured_within_the_limit(outer: Outer) -> None:
    outer.write(mlp("a"))
    code, _, said = outer.run("--limit", "0.001s")
    assert (code, "no run was measured before the limit" in said) == (1, True), said
