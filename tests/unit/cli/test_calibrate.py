"""`carma calibrate`, with an interpreter that has a torch of straw and a measuring program that only writes rows."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import time
from pathlib import Path

import pytest

from carma.cli import main
from carma.errors import NotRunnable, Refused
from carma.monitor import nvml
from carma.monitor.nvml import NvmlSampler
from carma.trial import calibrate
from carma.trial.replay.card_constants import load, read_rows, rows_file
from tests.harness import python_path
from tests.scripted_nvml import Card, ScriptedNvml

MIB = 1 << 20
LIMIT_S = 180.0
VERSIONS = {
    "versions": 1,
    "torch": "2.11.0+cu128",
    "cuda": "12.8",
    "cudnn": 91002,
    "python": "3.11.7",
    "date": "2026-01-31",
    "gpu": "NVIDIA H200",
    "driver": "580.65",
    "capability": [9, 0],
}
STEPS = ["matmul_fp32", "conv_fp32"]
CONSTANTS = [
    VERSIONS,
    {"op": "constant", "steps": STEPS, "after": "init", "outside_bytes": 500 * MIB},
    {"op": "constant", "steps": STEPS, "after": "matmul_fp32", "outside_bytes": 560 * MIB},
    {"op": "constant", "steps": STEPS, "after": "conv_fp32", "error": "it was refused"},
    {"op": "constant", "steps": ["conv_fp32"], "after": "init", "outside_bytes": 501 * MIB},
    {"op": "constant", "steps": ["conv_fp32"], "after": "conv_fp32", "outside_bytes": 640 * MIB},
    {"op": "first_call", "name": "mm", "dtype": "fp32", "call": 1, "direction": "forward", "kept_bytes": 33 * MIB},
    {"op": "first_call", "name": "mm", "dtype": "fp32", "call": 3, "direction": "forward", "kept_bytes": 1 * MIB},
    {"op": "first_call", "name": "sort", "dtype": "fp32", "call": 1, "direction": "forward", "kept_bytes": 7},
    {"op": "first_call", "name": "sort", "dtype": "fp32", "call": 3, "direction": "forward", "kept_bytes": 7},
]
ROWS = [
    VERSIONS,
    {"op": "convolution", "n": 8, "peak_bytes": 5, "out_bytes": 4, "kept_bytes": 4},
    {"op": "convolution", "n": 9, "error": "unsupported"},
    {"op": "convolution", "n": 10, "error": "out of memory", "short": True},
]


def measuring(tmp_path: Path, body: str) -> Path:
    """A stand-in for inside/carma_measure/main.py."""
    file = tmp_path / "main.py"
    file.write_text(
        "import json, os, sys, time\n"
        "out = sys.argv[sys.argv.index('--out') + 1]\n"
        f"constants, rows = json.loads({json.dumps(json.dumps([CONSTANTS, ROWS]))})\n"
        "def write(name, rows):\n"
        "    with open(os.path.join(out, name), 'w') as file:\n"
        "        file.write(''.join(json.dumps(row) + '\\n' for row in rows))\n" + textwrap.dedent(body)
    )
    return file


WHOLE = """
write("constants.jsonl", constants)
write("rows.jsonl", [*rows, {"op": "told", "gpu": os.environ["CUDA_VISIBLE_DEVICES"], "words": sys.argv[1:]}])
"""


@pytest.fixture
def torch_of_straw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "packages" / "torch"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("__version__ = '2.11.0+cu128'\nclass version:\n    cuda = '12.8'\n")
    monkeypatch.setenv("PYTHONPATH", python_path(folder.parent))
    return folder


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Card:
    """This machine has two of them."""
    first = Card("GPU-1")
    scripted = ScriptedNvml(first, Card("GPU-2", name="NVIDIA A30"))
    monkeypatch.setattr(
        nvml, "open_nvml", lambda: NvmlSampler(scripted, monotonic=scripted.monotonic, process_name=lambda _: "")
    )
    monkeypatch.setenv("CARMA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "120")
    return first


@pytest.mark.usefixtures("torch_of_straw", "card")
def test_estimates_use_the_measured_constants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate, "MAIN", measuring(tmp_path, WHOLE))
    assert main(["calibrate", "--python", sys.executable, "--gpu", "1", "--limit", "30s"]) == 0
    caught = capsys.readouterr()
    found = load("NVIDIA H200", "2.11.0", [tmp_path / "home" / "cards"])
    assert found is not None
    known = found.constants
    assert (known.driver, known.cudnn, known.capability, known.date) == ("580.65", "91002", (9, 0), "2026-01-31")
    assert known.context_mib([]) == 500
    assert known.context_mib(["matmul_fp32"]) == 560
    assert known.context_mib(["conv_fp32"]) == 640
    assert known.kept_once == {"mm_fp32_forward": 32 * MIB}
    assert known.rows == 3  # without the one for which the card was full
    *kept, told = read_rows(rows_file(found.file))
    assert kept == ROWS[1:3]
    assert told["gpu"] == "GPU-2"
    words = told["words"]
    assert isinstance(words, list)
    assert words[words.index("--limit-s") + 1] == "30"
    assert "500 MiB, 640 MiB with all libraries" in caught.out
    assert "32 MiB for each thread" in caught.out
    assert str(found.file) in "".join(caught.out.split())  # long paths are wrapped
    assert "measuring on GPU 1 (NVIDIA A30)" in caught.err


@pytest.mark.usefixtures("torch_of_straw", "card")
def test_constants_go_to_the_chosen_file_and_to_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate, "MAIN", measuring(tmp_path, WHOLE))
    out = tmp_path / "mine" / "card.json"
    assert main(["calibrate", "--python", sys.executable, "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpu"] == "NVIDIA H200"
    assert out.is_file()
    assert rows_file(out).name == "card.rows.jsonl.gz"
    assert not (tmp_path / "home" / "cards").exists()


@pytest.mark.usefixtures("torch_of_straw")
def test_other_processes_on_the_gpu_cause_a_note(
    card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate, "MAIN", measuring(tmp_path, WHOLE))
    card.compute = [(os.getpid(), 100 * MIB)]
    assert main(["calibrate", "--python", sys.executable]) == 0
    note = capsys.readouterr().err
    assert note.startswith("carma: note: ")
    assert "GPU 0" in note


@pytest.mark.usefixtures("torch_of_straw", "card")
def test_a_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--gpu", "7"]) == 4
    error = capsys.readouterr().err
    assert "there is no GPU 7" in error
    assert "1 (NVIDIA A30)" in error


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def none() -> NvmlSampler:
        return NvmlSampler(ScriptedNvml())

    monkeypatch.setattr(nvml, "open_nvml", none)
    monkeypatch.setenv("CARMA_HOME", str(tmp_path))
    assert main(["calibrate"]) == 1
    assert "NVIDIA" in capsys.readouterr().err


@pytest.mark.usefixtures("torch_of_straw", "card")
@pytest.mark.parametrize("limit", ["3s", "x"])
def test_a_limit_that_makes_no_sense(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--limit", limit]) == 2
    assert limit in capsys.readouterr().err


# The interpreter


def test_an_interpreter_without_torch_is_refused(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path), "PYTHONPATH": ""}
    (tmp_path / "python3").symlink_to("/bin/false")
    with pytest.raises(NotRunnable, match=r"python3 .*torch") as caught:
        calibrate.find_python(None, environ)
    assert "--python" in caught.value.hint
    with pytest.raises(NotRunnable, match="nowhere is not there"):
        calibrate.find_python("nowhere", environ)


def test_a_torch_without_cuda_is_refused(torch_of_straw: Path) -> None:
    (torch_of_straw / "__init__.py").write_text("__version__ = '2.13.0+cpu'\nclass version:\n    cuda = None\n")
    with pytest.raises(NotRunnable, match="built without CUDA"):
        calibrate.find_python(sys.executable, os.environ)


@pytest.mark.usefixtures("torch_of_straw")
def test_the_first_on_path_that_has_torch(tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "python3").symlink_to("/bin/false")
    (programs / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (programs / "python").chmod(0o755)
    found = calibrate.find_python(None, {**os.environ, "PATH": str(programs)})
    assert found == str(programs / "python")


# The measuring


def test_the_error_of_a_failed_measurement_has_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "MAIN", measuring(tmp_path, "sys.exit('no usable GPU: it is on fire')"))
    with pytest.raises(Refused, match=r"exit code 1.*it is on fire"):
        calibrate.measure(sys.executable, "GPU-1", 30.0, os.environ)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("", "which GPU"),
        ("write('constants.jsonl', constants[:1])", "no reading"),
        ("constants[0]['gpu'] = 'none'; write('constants.jsonl', constants)", "which GPU"),
    ],
)
def test_too_little_is_no_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, said: str) -> None:
    monkeypatch.setattr(calibrate, "MAIN", measuring(tmp_path, body))
    with pytest.raises(Refused, match=said):
        calibrate.measure(sys.executable, "GPU-1", 30.0, os.environ)


def test_a_cut_line_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = WHOLE + "open(os.path.join(out, 'rows.jsonl'), 'a').write('{\"op\": \"convo')\n"
    monkeypatch.setattr(calibrate, "MAIN", measuring(tmp_path, body))
    assert len(calibrate.measure(sys.executable, "GPU-1", 30.0, os.environ).rows) == 3


def test_one_that_does_not_end_is_ended_with_its_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted from the progress line, as Ctrl-C would, once a worker is there."""
    pids = tmp_path / "pids"
    body = f"""
    write("constants.jsonl", constants)
    child = os.fork()
    if child:
        with open({str(pids) + ".part"!r}, "w") as file:
            file.write(f"{{os.getpid()}} {{child}}")
        os.rename({str(pids) + ".part"!r}, {str(pids)!r})
    time.sleep(600)
    """
    monkeypatch.setattr(calibrate, "MAIN", measuring(tmp_path, body))

    def interrupt(_rows: int) -> None:
        if pids.exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate.measure(sys.executable, "GPU-1", 600.0, os.environ, interrupt)
    until_s = time.monotonic() + LIMIT_S
    while any(_lives(int(pid)) for pid in pids.read_text().split()):  # a signal needs a moment to do its work
        assert time.monotonic() < until_s
        time.sleep(0.02)


def _lives(pid: int) -> bool:
    """A killed worker whose parent is gone may wait for its new parent for a moment: it no longer lives."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
