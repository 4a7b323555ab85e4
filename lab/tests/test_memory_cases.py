"""The cases that estimates are measured against, the history's format, and the runner with its forks."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import carma_lab.bench.memory.zoo as zoo
from carma_lab.bench.memory.cases import LINEUP, Case, all_cases
from carma_lab.bench.memory.truth import INNER
from carma_lab.bench.memory.zoo import history
from carma_lab.bench.memory.zoo.case import options
from gpumemnet.dataset.torch_interpreter import environment

ZOO = Path(zoo.__path__[0])


def test_the_same_seed_gives_the_same_cases_and_another_seed_others() -> None:
    cases = all_cases(0)
    assert cases == all_cases(0)
    assert cases != all_cases(1)


def test_there_are_enough_cases_each_with_a_name_and_settings_of_its_own() -> None:
    cases = all_cases()
    assert 520 <= len(cases) <= 700
    assert len({case.id for case in cases}) == len(cases)
    assert len({case.argv for case in cases}) == len(cases)


def test_a_family_that_is_left_out_is_large_enough_to_tell_something() -> None:
    sizes = Counter(case.family for case in all_cases())
    assert len(sizes) >= 45
    assert min(size for family, size in sizes.items() if not family.startswith("own-")) >= 6
    assert min(sizes.values()) >= 4


@pytest.mark.parametrize("option", ["--optimizer", "--precision"])
def test_every_optimizer_and_precision_is_met(option: str) -> None:
    met = Counter(case.argv[case.argv.index(option) + 1] for case in all_cases())
    choices = next(action.choices for action in options()._actions if option in action.option_strings)
    assert choices is not None
    assert set(met) == set(choices)
    assert min(met.values()) >= 15


@pytest.mark.parametrize("flag", ["--checkpoint", "--accumulate", "--channels-last", "--clip", "--padding"])
def test_every_way_to_train_is_met(flag: str) -> None:
    assert sum(flag in case.argv for case in all_cases()) >= 20


def test_the_script_takes_the_arguments_of_every_case() -> None:
    for case in all_cases():
        args = options().parse_args(list(case.argv))
        assert args.batch >= 1
        assert args.model == case.id.rpartition(".")[0]


def test_a_model_does_not_get_settings_that_it_does_not_stand() -> None:
    entries = {entry.model: entry for entry in LINEUP}
    for case in all_cases():
        args = options().parse_args(list(case.argv))
        entry = entries[args.model]
        assert args.precision not in entry.without
        assert entry.checkpoint or not args.checkpoint
        assert entry.evaluate or not args.eval_batch


def test_every_model_of_ours_has_a_builder_in_the_zoo() -> None:
    written = {
        node.value
        for path in ZOO.glob("models_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    written |= set(json.loads((ZOO / "models_hf.json").read_text()))
    ours = {entry.model for entry in LINEUP if entry.model.startswith(("own-", "hf-"))}
    assert {name for name in ours - written if not re.fullmatch(r"own-mlp(-norm)?-\d+x\d+", name)} == set()


@pytest.mark.parametrize("path", sorted(ZOO.glob("*.py")), ids=lambda path: path.name)
def test_the_zoo_needs_no_carma(path: Path) -> None:
    """It is run by an interpreter that has torch and may have no carma."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not [name for name in names if name.split(".")[0] == "carma"]


def test_the_script_asks_nothing_about_memory() -> None:
    """The same program is traced without a GPU, so it may not behave otherwise there."""
    text = (ZOO / "case.py").read_text()
    assert "torch.cuda" not in text
    assert "memory_" not in text.replace("memory_format", "")


events = st.lists(
    st.fixed_dictionaries(
        {
            "action": st.sampled_from(history.ACTIONS),
            "size": st.integers(0, 1 << 40),
            "addr": st.integers(0, 1 << 47),
            "stream": st.sampled_from([0, 94_000_000]),
        }
    )
)


@given(events)
def test_a_history_comes_back_as_it_went_in(entries: list[dict[str, Any]]) -> None:
    name, back = history.unpack(history.pack("a-case", entries))
    base = min((entry["addr"] for entry in entries), default=0)
    streams = list(dict.fromkeys(entry["stream"] for entry in entries))
    assert name == "a-case"
    assert back == [
        (entry["action"], entry["size"], entry["addr"] - base, streams.index(entry["stream"])) for entry in entries
    ]


def test_a_file_of_histories_that_was_cut_short_keeps_the_whole_ones() -> None:
    whole = [history.pack(str(number), [{"action": "alloc", "size": 512, "addr": 0}]) for number in range(3)]
    data = b"".join(whole)
    assert list(history.records(data)) == whole
    assert list(history.records(data[:-1])) == whole[:2]


def test_a_history_over_the_cap_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "CAP_EVENTS", 10)
    record = history.pack("long", [{"action": "alloc", "size": n, "addr": n, "stream": 0} for n in range(25)])
    assert len(history.unpack(record)[1]) == 10
    assert b'"seen": 25' in record


# The runner with its real forks; only what a case does is played: it answers, dies, hangs, or runs out of memory
# unless it is the second time.
RUNNER = """
import json, os, sys, time
sys.path.insert(0, sys.argv[1])
import history, truth

def answer(line, case, device, folder):
    messages = line.makefile("r")
    def say(said, row=None): line.sendall(json.dumps({"said": said, "row": row}).encode() + b"\\n")
    say("ready")
    messages.readline()
    match case["family"]:
        case "dies": os._exit(3)
        case "hangs": time.sleep(1000)
        case "crowded":
            mark = folder / "crowded"
            row = {"error": None, "again": not mark.exists()}
            mark.touch()
        case _: row = {"error": None, "reserved_peak": 4 << 20}
    record = history.pack(case["id"], [{"action": "alloc", "size": 7, "addr": 9}])
    (folder / f"{os.getpid()}.bin").write_bytes(record)
    say("row", row)
    messages.readline()

truth.import_libraries = lambda: {"torch": "none"}
truth.gpu = lambda device: {"gpu": "made up"}
truth.measure.answer = answer
sys.exit(truth.main(sys.argv[2:]))
"""


def measured(tmp_path: Path, families: list[str], *more: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The first line and the rows by id, where the id is the family and its number."""
    cases = [Case(f"{family}.{number}", family, ()) for number, family in enumerate(families)]
    lines = [json.dumps({"id": case.id, "family": case.family, "argv": []}) for case in cases]
    (tmp_path / "cases.jsonl").write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-c", RUNNER, str(ZOO), str(tmp_path / "cases.jsonl"), str(tmp_path / "out"), *more]
    subprocess.run(command, check=True, capture_output=True, timeout=120, env=environment(INNER))
    first, *rows = [json.loads(line) for line in (tmp_path / "out" / "truth.jsonl").read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows)
    return first, {row["id"]: row for row in rows}


def test_every_case_becomes_a_row_also_one_that_dies(tmp_path: Path) -> None:
    first, rows = measured(tmp_path, ["fine", "dies", "fine"])
    assert (first["gpu"], first["torch"], first["cases"]) == ("made up", "none", 3)
    assert set(rows) == {"fine.0", "dies.1", "fine.2"}
    assert rows["fine.0"]["reserved_peak"] == 4 << 20
    assert "status 3" in rows["dies.1"]["error"]


def test_a_row_says_where_its_history_lies(tmp_path: Path) -> None:
    _, rows = measured(tmp_path, ["fine"] * 5)
    for row in rows.values():
        file, offset, length = row["history"]
        record = (tmp_path / "out" / file).read_bytes()[offset : offset + length]
        assert history.unpack(record)[0] == row["id"]


def test_a_case_over_its_time_is_killed_and_the_run_ends(tmp_path: Path) -> None:
    _, rows = measured(tmp_path, ["hangs"], "--case-limit-s", "0.3")
    assert "more than 0.3 s" in rows["hangs.0"]["error"]


def test_a_run_that_exceeds_the_time_limit_is_stopped_and_reported(tmp_path: Path) -> None:
    _, rows = measured(tmp_path, ["hangs", "hangs"], "--limit-s", "0.5", "--parallel", "2")
    assert {row["error"] for row in rows.values()} <= {"stopped: the time of all cases was over"}


def test_a_case_that_met_the_cards_end_beside_others_is_run_again_alone(tmp_path: Path) -> None:
    _, rows = measured(tmp_path, ["crowded", "fine"])
    assert rows["crowded.0"]["error"] is None
    assert rows["crowded.0"]["alone"]
    assert not rows["fine.1"]["alone"]


def test_cases_that_were_measured_before_can_be_left_out(tmp_path: Path) -> None:
    done = tmp_path / "before.jsonl"
    done.write_text('{"gpu":"x"}\n{"id":"fine.0","error":null}\n{"id":"fine.1","error":"CUDA out of memory"}\n')
    first, rows = measured(tmp_path, ["fine", "fine", "fine"], "--skip", str(done))
    assert set(rows) == {"fine.1", "fine.2"}
    assert first["cases"] == 2
