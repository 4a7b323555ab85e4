"""`zoo/truth.py` as a program of its own: real forks on the CPU, with scripted cases instead of torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from carma_lab.bench.memory.truth import INNER, ZOO
from gpumemnet.dataset.torch_interpreter import environment

LIMIT_S = 60.0
DRIVER = """
import os, sys, time, types
sys.path.insert(0, sys.argv.pop(1))

def main(argv):
    print("discarded")
    how, runs = argv[0], argv[1]
    with open(runs, "a") as file:
        file.write(how + "\\n")
    with open(runs) as file:
        first = file.read().splitlines().count(how) == 1
    if how == "broken":
        raise ValueError("no such model")
    if how == "exits":
        os._exit(3)
    if how == "oom" or (how == "crowded" and first):
        raise RuntimeError("CUDA out of memory")
    if how == "hangs":
        time.sleep(600)

for name, parts in {
    "training_run": {"describe": lambda device: {"gpu": None, "uuid": "x", "driver": "1"}},
    "activity": {},
    "case": {"main": main},
}.items():
    module = sys.modules[name] = types.ModuleType(name)
    vars(module).update(parts)
import truth
truth.import_libraries = lambda: {"torch": "0.0"}
sys.exit(truth.main(sys.argv[1:]))
"""


class Place:
    """A directory with cases, and the rows of the program."""

    def __init__(self, folder: Path) -> None:
        self.cases, self.out, self.runs = folder / "cases.jsonl", folder / "out", folder / "runs"

    def run(self, *ways: str, words: tuple[str, ...] = ()) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        cases = [{"id": f"{way}-1", "family": way, "argv": [way, str(self.runs)]} for way in ways]
        self.cases.write_text("".join(json.dumps(case) + "\n" for case in cases))
        command = [sys.executable, "-c", DRIVER, str(ZOO), str(self.cases), str(self.out), "--device", "cpu", *words]
        ended = subprocess.run(
            command, env=environment(INNER), capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert ended.returncode == 0, ended.stderr
        assert "discarded" not in ended.stdout
        head, *rows = [json.loads(line) for line in (self.out / "truth.jsonl").read_text().splitlines()]
        assert len({row["id"] for row in rows}) == len(rows)
        return head, {row["family"]: row for row in rows}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_each_end_of_a_case_is_a_row_and_a_case_short_of_memory_is_repeated_alone(place: Place) -> None:
    head, rows = place.run("ends", "broken", "exits", "oom", "crowded", words=("--parallel", "5"))
    assert (head["torch"], head["driver"], head["cases"], "uuid" in head) == ("0.0", "1", 5, False)
    ends = {way: (row["error"], row["alone"]) for way, row in rows.items() if way != "broken"}
    assert ends == {
        "ends": (None, False),
        "exits": ("the process ended with status 3 and no row", True),
        "oom": ("out of memory", True),
        "crowded": (None, True),
    }
    assert rows["broken"]["error"].startswith("ValueError: no such model [")
    assert rows["oom"]["oom"] is True
    assert sorted(place.runs.read_text().split()) == sorted(
        ["ends", "broken", "exits", "exits", "oom", "oom", "crowded", "crowded"]
    )


def test_a_case_over_its_limit_is_killed_and_not_repeated(place: Place) -> None:
    _, rows = place.run("hangs", words=("--case-limit-s", "0.5"))
    assert rows["hangs"]["error"] == "it took more than 0.5 s (running)"


def test_running_cases_are_killed_when_the_time_of_all_is_over(place: Place) -> None:
    _, rows = place.run("hangs", words=("--limit-s", "1"))
    assert rows["hangs"]["error"].startswith("stopped")


def test_cases_that_are_done_are_skipped(place: Place, tmp_path: Path) -> None:
    place.run("ends", "broken")
    done = (place.out / "truth.jsonl").rename(tmp_path / "done.jsonl")
    _, rows = place.run("ends", "broken", words=("--skip", str(done)))
    assert set(rows) == {"broken"}
    assert place.runs.read_text().split().count("ends") == 1
    assert place.runs.read_text().split().count("broken") == 2
