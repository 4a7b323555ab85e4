"""`carma dataset collect`: the half that runs in CARMA's own interpreter, and the whole on the CPU."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from carma.cli import main
from carma.errors import NoGpus, Refused, Usage
from gpumemnet.cli.collect import command
from gpumemnet.dataset import collect
from gpumemnet.dataset.config import Config
from gpumemnet.dataset.inside import rows
from gpumemnet.dataset.torch_interpreter import find_torch
from gpumemnet_fixtures.dataset_rows import write_configs

SAID = {"torch": "2.13.0", "gpu": True}


def config(name: str, op: str = "linear") -> Config:
    model = ({"op": op, "out": 4},)
    return Config(id=name, family="mlp", shape="uniform", batch=2, input=(3,), outputs=4, model=model)


@pytest.fixture
def options(tmp_path: Path) -> collect.CollectOptions:
    write_configs(tmp_path / "configs.jsonl", config("a"), config("b"), config("c"))
    return collect.CollectOptions(configs=tmp_path / "configs.jsonl", out=tmp_path / "out", device="cpu")


def python(tmp_path: Path, text: str) -> str:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return str(program)


def straw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """In place of inside/collect.py: `rows` is the file, `words` its arguments."""
    main = tmp_path / "straw.py"
    begin = "import json, os, sys, time\nwords = sys.argv[1:]\nrows = open(os.path.join(words[1], 'rows.jsonl'), 'a')\n"
    main.write_text(begin + body)
    monkeypatch.setattr(collect, "MAIN", main)


def test_the_verb_measures_and_sums_up(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    configs, out = tmp_path / "configs.jsonl", tmp_path / "out"
    write_configs(configs, config("a"), config("b"), config("c", "nothing"))
    words = [str(configs), "--out", str(out), "--device", "cpu", "--python", sys.executable, "--parallel", "2"]
    ended = CliRunner().invoke(command, words, standalone_mode=False)
    assert (ended.exception, ended.return_value) == (None, 0)
    said = " ".join(ended.output.split())
    assert "measured 2 " in said
    assert "failed 1 once: ValueError: there is no op 'nothing'" in said
    assert "left 0 " in said
    assert "3 of 3 runs are done" in said
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert {row["id"]: row["parameters"] for row in rows[1:] if row["steps"]} == {"a": 16, "b": 16}


def test_options_are_passed_to_the_measuring_program(
    tmp_path: Path, options: collect.CollectOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    straw(tmp_path, monkeypatch, "print(json.dumps(words), file=open(os.path.join(words[1], 'words'), 'w'))")
    told = collect.CollectOptions(
        configs=options.configs,
        out=options.out,
        parallel=3,
        limit_s=90,
        run_limit_s=5,
        activity=True,
        seed=7,
        device="cpu",
    )
    collect.collect(told, sys.executable)
    words = json.loads((options.out / "words").read_text())
    assert words[:2] == [str(options.configs), str(options.out)]
    assert words[2:4] == ["--parent", str(os.getpid())]
    assert words[4:10] == ["--limit-s", "90", "--seed", "7", "--device", "cpu"]
    assert words[10:] == ["--config-limit-s", "5", "--parallel", "3", "--activity"]


def test_rows_are_counted_as_they_come_and_those_from_before_too(
    tmp_path: Path, options: collect.CollectOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    options.out.mkdir()
    rows = options.out / "rows.jsonl"
    rows.write_text('{"gpu":"x"}\n{"id":"a","error":null,"oom":false}\n{"id":"other"}\n')
    straw(tmp_path, monkeypatch, "rows.write(json.dumps({'id': 'b', 'oom': True}) + '\\n')")
    told: list[tuple[int, int]] = []
    tally = collect.collect(options, sys.executable, lambda done, total: told.append((done, total)))
    assert (tally.measured, tally.oom, tally.failed, tally.left) == (1, 1, 0, 1)
    assert told[0] == (1, 3)
    assert told[-1] == (2, 3)
    assert tally.per_s > 0


def test_a_collection_without_resume_counts_no_earlier_rows(
    tmp_path: Path, options: collect.CollectOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    options.out.mkdir()
    (options.out / "rows.jsonl").write_text('{"id":"a"}\n')
    straw(tmp_path, monkeypatch, "")
    again = collect.CollectOptions(configs=options.configs, out=options.out, resume=False, device="cpu")
    assert collect.collect(again, sys.executable).left == 3
    assert (options.out / "rows.jsonl.old").read_text() == '{"id":"a"}\n'


def test_a_row_counts_when_it_is_whole(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    count = collect.RowCounter(rows, dict.fromkeys("ab", "0"), activity=False)
    assert count.update() == 0
    rows.write_text('{"gpu":"x"}\n{"id":"a"}\n{"id":')
    assert count.update() == 1
    with rows.open("a") as file:
        file.write('"b"}\nnot json\n')
    assert count.update() == 2


def test_without_activity_a_row_does_not_count_where_it_is_wanted(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id":"a"}\n{"id":"b","step_ms":null,"error":"x"}\n{"id":"c","step_ms":2.5}\n')
    assert collect.RowCounter(rows, dict.fromkeys("abc", "0"), activity=True).done == 2
    assert collect.RowCounter(rows, dict.fromkeys("abc", "0"), activity=False).done == 3


def test_a_row_of_another_config_with_the_same_id_does_not_count(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id":"a","of":"1"}\n{"id":"b","of":"2"}\n{"id":"c"}\n')
    assert collect.RowCounter(rows, dict.fromkeys("abc", "1"), activity=False).done == 2


def test_the_most_frequent_errors_are_counted(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    errors = ["RuntimeError: shape 12x7 [build.py:3]", "RuntimeError: shape 9x100 [build.py:3]", "B: x", "C: x", "D: x"]
    lines = [json.dumps({"id": str(place), "error": error}) for place, error in enumerate([*errors, "B: x"])]
    rows.write_text("\n".join(lines) + "\n")
    tally = collect.RowCounter(rows, dict.fromkeys("012345678", "0"), activity=False).tally(2.0)
    assert (tally.failed, tally.measured, tally.left) == (6, 0, 3)
    assert tally.errors == {"RuntimeError: shape 12x7": 2, "B: x": 2, "C: x": 1}


def test_a_failed_measuring_is_reported_with_its_last_line(
    tmp_path: Path, options: collect.CollectOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    straw(tmp_path, monkeypatch, "print('first')\nsys.exit('there is no GPU to measure on')")
    with pytest.raises(Refused, match="no GPU"):
        collect.collect(options, sys.executable)


def test_an_interrupt_ends_the_measuring(
    tmp_path: Path, options: collect.CollectOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM first, so that it can end its own processes."""
    ready, ended = tmp_path / "ready", tmp_path / "ended"
    straw(
        tmp_path,
        monkeypatch,
        "import signal\n"
        "def end(*_):\n"
        f"    open({str(ended)!r}, 'w').close()\n"
        "    sys.exit(130)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        f"open({str(tmp_path / 'part')!r}, 'w').write(str(os.getpid()))\n"
        f"os.rename({str(tmp_path / 'part')!r}, {str(ready)!r})\n"
        "time.sleep(600)\n",
    )

    def interrupt(_done: int, _total: int) -> None:
        if ready.exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect.collect(options, sys.executable, interrupt)
    assert ended.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int(ready.read_text()), 0)


def test_wrong_options_are_errors_before_anything_is_run(tmp_path: Path, options: collect.CollectOptions) -> None:
    with pytest.raises(Usage, match="cannot be read"):
        collect.collect(collect.CollectOptions(configs=tmp_path / "none", out=tmp_path), sys.executable)
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(Usage, match="has no configs"):
        collect.collect(collect.CollectOptions(configs=tmp_path / "empty", out=tmp_path), sys.executable)
    with pytest.raises(Usage, match="cannot be made"):
        collect.collect(collect.CollectOptions(configs=options.configs, out=options.configs / "out"), sys.executable)


def test_an_interpreter_must_have_torch_and_see_a_gpu(tmp_path: Path) -> None:
    found = find_torch(python(tmp_path, f"echo noise; echo '{json.dumps(SAID)}'"), with_gpu=True)
    assert found == str(tmp_path / "python")
    blind = python(tmp_path, f"echo '{json.dumps(SAID | {'gpu': False})}'")
    assert find_torch(blind, with_gpu=False) == blind
    with pytest.raises(NoGpus, match=r"torch 2\.13\.0 of .* finds no GPU"):
        find_torch(blind, with_gpu=True)
    with pytest.raises(Refused, match="No module named 'torch'"):
        find_torch(python(tmp_path, "echo \"No module named 'torch'\" >&2; exit 1"), with_gpu=True)
    with pytest.raises(Usage, match="there is no program"):
        find_torch(str(tmp_path / "nowhere"), with_gpu=True)


def test_configs_are_looked_at_before_torch_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["dataset", "collect", str(tmp_path / "none.jsonl"), "--out", str(tmp_path / "out")]
    assert main([*words, "--python", str(tmp_path / "no-python")]) == 2
    assert "none.jsonl cannot be read" in capsys.readouterr().err


def test_a_full_disk_is_an_error_with_the_file(tmp_path: Path) -> None:
    kept = rows.Rows(tmp_path, resume=True, activity=False)
    kept.file.close()
    full = r"rows\.jsonl cannot be written: No space left on device"
    kept.file = io.TextIOWrapper(io.BufferedWriter(io.FileIO("/dev/full", "a")))
    with pytest.raises(SystemExit, match=full):
        kept.write({"id": "a"})
    with pytest.raises(OSError, match="No space left"):
        kept.file.close()  # it has the row still
