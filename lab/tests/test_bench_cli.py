"""`carma bench VERB`: the flags reach the studies, and errors have the right exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from carma.cli import main
from carma.errors import NoGpus
from carma_lab.bench import sampler as samplerbench
from carma_lab.bench import soak
from carma_lab.bench import steps as stepbench
from carma_lab.bench.crash import study as crash
from carma_lab.bench.gpu import collocation, interference, trial, trial_oom
from carma_lab.bench.gpu import environment as lab
from carma_lab.bench.trace import gpus as trace_gpus
from carma_lab.bench.trace import study as trace
from carma_lab.cli import bench


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    options: list[Any] = []

    def run(given: Any) -> int:
        options.append(given)
        return 0

    for study in (collocation, interference, trial, samplerbench, crash, soak, stepbench, trace):
        monkeypatch.setattr(study, "run", run)
    return options


def test_flags_left_out_are_the_studies_own_defaults(called: list[Any]) -> None:
    assert main(["bench", "interference"]) == 0
    assert main(["bench", "collocation"]) == 0
    assert main(["bench", "gpu"]) == 0
    assert main(["bench", "sampler"]) == 0
    assert main(["bench", "crash"]) == 0
    assert main(["bench", "soak"]) == 0
    assert main(["bench", "steps"]) == 0
    assert main(["bench", "trace"]) == 0
    private = [crash.Options(), soak.Options(), stepbench.Options(), trace.Options()]
    assert called == [interference.Options(), collocation.Options(), trial.Options(), samplerbench.Options(), *private]


def test_flags_reach_the_study(called: list[Any]) -> None:
    words = "bench interference --mechanism timeslice --pairs 3 --triples 2 --quadruples 1 --seed 9 --seconds 2.5"
    main([*words.split(), "--percent", "75, 25,25", "--gpu", "1", "--limit", "1m", "--out", "x.json"])
    words = "bench collocation --copies 4 --task large --mechanism mps --mechanism mig --seconds 2 --plot a.png"
    main([*words.split(), "--redraw", "b.json", "--limit", "9"])
    words = "bench gpu --out there --only oom,tasks --virtual --tasks 4 --scale 0.5"
    main([*words.split(), "--rungs", "mps"])
    main(["bench", "sampler", "--seconds", "5", "--gpus", "2", "--out", "-"])
    main(["bench", "crash", "--kills", "30", "--seed", "7", "--restores", "2", "--out", "c.json"])
    main(["bench", "soak", "--tasks", "300", "--retention", "9", "--out", "-"])
    main(["bench", "steps", "--python", "py", "--rounds", "3", "--out", "s.json"])
    words = "bench trace --out there --trace heavy --tasks 4 --span 30 --seconds 20 --seed 3 --only alone,goodput:known"
    more = "--repeat 2 --split 2 --set gate.enabled=no --limit 9m --resume --virtual"
    main([*words.split(), *more.split()])
    main(["bench", "trace", "--redraw"])
    assert called == [
        interference.Options(
            mechanism="timeslice",
            pairs=3,
            triples=2,
            quadruples=1,
            percent=(75, 25),
            seed=9,
            seconds=2.5,
            gpu="1",
            limit_s=60.0,
            json="x.json",
        ),
        collocation.Options(
            copies=4,
            task=("large",),
            mechanism=("mps", "mig"),
            seconds=2.0,
            plot="a.png",
            redraw="b.json",
            limit_s=9.0,
        ),
        trial.Options(out="there", parts=("oom", "tasks"), virtual=True, tasks=4, scale=0.5, rungs=("mps",)),
        samplerbench.Options(seconds=5.0, gpus=2, json="-"),
        crash.Options(kills=30, seed=7, restores=2, json="c.json"),
        soak.Options(tasks=300, retention_s=9.0, json="-"),
        stepbench.Options(python="py", rounds=3, json="s.json"),
        trace.Options(
            out="there",
            trace="heavy",
            tasks=4,
            span_s=30.0,
            seconds=20.0,
            seed=3,
            only=("alone", "goodput:known"),
            repeat=2,
            split=2,
            settings={"gate.enabled": "no"},
            limit_s=540.0,
            resume=True,
            virtual=True,
        ),
        trace.Options(redraw=True),
    ]


def test_the_parts_and_rungs_of_the_trial_are_those_that_it_has() -> None:
    assert bench.PARTS == trial.PARTS
    assert tuple(rung.name for rung in trial_oom.RUNGS) == bench.RUNGS
    assert bench.TRACE_RUNS == trace.CASES


@pytest.mark.parametrize("percent", ["0", "100", "half", "25;50", "-5", "2.5"])
def test_an_invalid_percentage_is_an_error(called: list[Any], percent: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "interference", f"--percent={percent}"]) == 2
    assert "25,50,75" in capsys.readouterr().err
    assert called == []


def test_an_unknown_part_is_an_error(called: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu", "--only", "tasks,ooom"]) == 2
    assert "'ooom' is not one of tasks, oom" in capsys.readouterr().err
    assert called == []


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999", "５", "1_0", "many", "0", ""])
@pytest.mark.parametrize(
    "flag",
    [
        *("gpu --scale", "gpu --limit", "sampler --seconds", "interference --seconds", "interference --limit"),
        *("collocation --seconds", "collocation --limit", "trace --seconds", "trace --limit"),
    ],
)
def test_an_invalid_number_is_an_error(
    called: list[Any], flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *flag.split(), value]) == 2
    said = capsys.readouterr().err
    assert flag.split()[1] in said
    told = ("is not a number", "is not a duration", "it must be between")
    assert any(words in said for words in told)
    assert called == []


@pytest.mark.parametrize("verb", ["interference", "collocation", "sampler", "gpu", "trace"])
def test_without_a_gpu_the_exit_code_is_that_of_the_error_and_the_hint_helps(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(*_: object, **__: object) -> Any:
        raise NoGpus("No GPU here.", "Try virtual ones.")

    for module in (lab, trial, trace_gpus):
        monkeypatch.setattr(module, "open_nvml", none)
    monkeypatch.setattr(samplerbench, "load_nvml", none)
    monkeypatch.chdir(tmp_path)
    assert main(["bench", verb]) == NoGpus.exit_code
    said = capsys.readouterr().err
    assert "No GPU here." in said
    assert "run it where one is" in said
    assert "virtual ones" not in said
    assert not list(tmp_path.iterdir())
