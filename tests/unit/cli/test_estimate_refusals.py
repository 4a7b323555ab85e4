"""`carma estimate`: refusals with their hints, comparisons, summaries, mistakes, Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from carma.core.model.values import Estimate, NoEstimate
from carma.core.ports import EstimateRequest
from carma.trial.estimator import why_not
from carma.trial.layers.description import Described
from carma.trial.protocol import Context, Trial
from carma.trial.report import TrialReport
from carma.trial.sandbox import Ending, Sandbox, SandboxLimits, SandboxRun, SandboxStatus
from carma.trial.trial_reasons import NoTrial, no_trial
from tests.unit.cli.estimate_world import ANSWER, LIMIT_S, World, complained, figures, printed

LIMITS = SandboxLimits(seconds=9, memory_mib=100)


def ended(how: Ending, code: int = 0, stderr: str = "") -> NoTrial:
    return no_trial(SandboxStatus(ended=how, code=code, stderr=stderr), ("python", "x.py"), LIMITS)


def reported(stop: str, cause: str, reason: str = "why") -> Trial:
    return Trial(msgspec.convert({"format": 1, "stop": stop, "cause": cause, "reason": reason}, TrialReport), b"", 1.0)


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (ended("exit", 2, "can't open file 'x.py'"), "fix it first"),
        (ended("exit", -11), "fix it first"),
        (ended("not_started"), "fix it first"),
        (reported("error", "crashed"), "fix it first"),
        (reported("error", "no_network"), "submit it with --gpu-mem"),
        (reported("end", "no_gpu"), "it needs no GPU memory"),
        (reported("end", ""), "submit it with --gpu-mem"),
        (reported("unsupported", ""), "submit it with --gpu-mem"),
        (ended("exit", 0), "submit it with --gpu-mem"),
        (ended("time"), "--limit"),
        (ended("memory"), "memory.trial_memory_mib"),
        (ended("refused"), "submit it with --gpu-mem"),
        # --batch belongs to --summary: it would not be taken here.
        (NoEstimate(source="trace", reason="the batch size is not known; the formula needs it"), "--gpu-mem"),
    ],
)
def test_the_hint_is_for_the_reason(
    world: World, capsys: pytest.CaptureFixture[str], answer: Trial | NoEstimate, hint: str
) -> None:
    def by_trial(context: Context, request: EstimateRequest) -> NoEstimate:
        ran = context.trials.run(request)
        return ran if isinstance(ran, NoEstimate) else NoEstimate(source="trace", reason=why_not(ran.report) or "")

    world.trials.answer = answer
    world.says["trace"] = by_trial
    assert hint in " ".join(complained(capsys, 1, "--gpu", "h200", "--", "sh").split())


def test_a_refusal_that_is_not_the_trials_has_no_hint_about_the_trial(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    def picky(context: Context, request: EstimateRequest) -> NoEstimate:
        context.trials.run(request)
        return NoEstimate(source="trace", reason="only for language models")

    world.trials.answer = reported("error", "crashed")
    world.says["trace"] = picky
    assert "submit it with --gpu-mem" in complained(capsys, 1, "--gpu", "h200", "--", "sh")


def test_a_refusal_is_exit_code_1_with_the_reason(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.says["trace"] = lambda _c, _r: NoEstimate(source="trace", reason="no optimizer step was seen")
    row = figures(capsys, "--gpu", "h200", "--", "sh", code=1)
    assert row.pop("took_s") >= 0
    assert row == {"refused": "no optimizer step was seen", "estimator": "trace", "gpu": "NVIDIA H200"}
    assert "no optimizer step was seen" in complained(capsys, 1, "--gpu", "h200", "--", "sh")


def test_sources_of_the_settings_are_asked_in_order(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "config.toml").write_text('[memory]\nsources = ["declared", "mine", "trace"]\n')
    world.says["mine"] = lambda _c, _r: NoEstimate(source="mine", reason="it is not mine")
    row = figures(capsys, "--gpu", "h200", "--", "sh")
    assert row["estimator"] == "trace"
    assert len(world.requests) == 2


# --compare


def test_all_are_compared_after_one_trial(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    def by_trial(context: Context, request: EstimateRequest) -> Estimate:
        assert isinstance(context.trials.run(request), Trial)
        return ANSWER

    def by_model(context: Context, request: EstimateRequest) -> Estimate:
        assert isinstance(context.trials.describe(request), Described)
        return Estimate(footprint_mib=100, upper_mib=100, source="aaa", warnings=("leaves out " + "much " * 40, "end"))

    def broken(_context: Context, _request: EstimateRequest) -> Estimate:
        raise RuntimeError("boom")

    world.says = {"trace": by_trial, "aaa": by_model, "zzz": broken}
    rows = figures(capsys, "--compare", "--gpu", "h200", "--", "sh")
    assert [row["estimator"] for row in rows] == ["trace", "aaa", "zzz"]
    assert [row.get("footprint_mib") for row in rows] == [5_000, 100, None]
    assert [row.get("bound_mib") for row in rows] == [5_427, None, None]
    assert "boom" in rows[2]["refused"]
    assert len(world.trials.runs) == 1
    text = printed(capsys, "--compare", "--gpu", "h200", "--", "sh")
    assert "for an NVIDIA H200" in text
    assert "100 MiB" in text
    assert "boom" in text
    assert "2 warnings" in text
    assert text.count("much") == 40


def test_a_failed_trial_is_not_run_again_for_each(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.trials.answer = NoEstimate(source="trace", reason="it ended with exit code 1")
    world.says = {name: lambda context, request: context.trials.describe(request) for name in ("a", "b", "trace")}
    rows = figures(capsys, "--compare", "--gpu", "h200", "--", "sh", code=1)
    assert [row["refused"] for row in rows] == ["it ended with exit code 1"] * 3
    assert len(world.trials.runs) == 1


# --summary


TREE = "Net(\n  (fc): Linear(in_features=10, out_features=5, bias=True)\n)\n"


def test_a_summary_stands_in_for_a_command(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.txt").write_text(TREE)
    seen: list[object] = []

    def by_model(context: Context, request: EstimateRequest) -> Estimate | NoEstimate:
        seen.append(context.trials.describe(request))
        run = context.trials.run(request)
        assert isinstance(run, NoEstimate)
        return Estimate(footprint_mib=900, upper_mib=900, source="horus")

    world.says["horus"] = by_model
    row = figures(capsys, "--gpu", "h200", "--estimator", "horus", "--summary", "net.txt", "--batch", "4")
    assert row["footprint_mib"] == 900
    (described,) = seen
    assert isinstance(described, Described)
    assert (described.parameters, described.batch) == (55, 4)
    assert world.trials.runs == []


# Mistakes


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "no command was given"),
        (("--",), 2, "no command was given"),
        (("--", ""), 2, "the first word of the command is empty"),
        (("--", "no-such-program-here"), 1, "no-such-program-here"),
        (("--estimator", "tracee", "--", "sh"), 2, "there is no estimator 'tracee'"),
        (("--gpu", "h2000", "--", "sh"), 4, "Did you mean h200?"),
        (("--gpu", "7", "--", "sh"), 4, "there is no GPU 7 on this machine"),
        (("--compare", "--estimator", "trace", "--", "sh"), 2, "--compare"),
        (("--batch", "3", "--", "sh"), 2, "--batch needs --summary"),
        (("--summary", "x"), 2, "--estimator"),
        (("--summary", "missing.txt", "--estimator", "horus"), 1, "missing.txt"),
        (("--limit", "0", "--", "sh"), 2, "at least 1s"),
        (("--level", "1.5", "--", "sh"), 2, "between 0.5 and"),
        (("--gpus", "0", "--", "sh"), 2, "between 1 and 64"),
    ],
)
def test_a_mistake_has_an_exit_code_and_runs_nothing(
    world: World, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int, said: str
) -> None:
    if words and words[0] == "--":
        words = ("--gpu", "h200", *words)
    assert said in complained(capsys, code, *words)
    assert world.trials.runs == []


def test_a_summary_that_is_none_names_its_file(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.txt").write_text("hello\n")
    error = complained(capsys, 2, "--summary", "net.txt", "--estimator", "horus")
    assert "net.txt: " in error
    assert not world.requests


# As a process


def test_ctrl_c_ends_the_trial(tmp_path: Path) -> None:
    """The command sleeps in its box; with the verb it goes."""
    if not can_box(tmp_path):
        pytest.skip("namespaces are not to be had here")
    naptime = f"{600 + os.getpid() % 97}.{tmp_path.stat().st_ino}"  # no other process sleeps for exactly this time
    environ = {**os.environ, "CARMA_HOME": str(tmp_path / "home"), "COLUMNS": "100"}
    words = ["estimate", "--gpu", "h200", "--estimator", "horus", "--", "sleep", naptime]
    verb = subprocess.Popen(
        [sys.executable, "-m", "carma", *words], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        wait_until(lambda: sleeps(naptime) or verb.poll() is not None)
        verb.send_signal(signal.SIGINT)
        out, err = verb.communicate(timeout=LIMIT_S)
    finally:
        verb.kill()
        verb.wait()
    assert (verb.returncode, out) == (130, b""), err
    wait_until(lambda: not sleeps(naptime))


def sleeps(naptime: str) -> bool:
    """Whether a process of that command line is there; those of a box can be seen from outside."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if file.read_bytes() == b"\0".join((b"sleep", naptime.encode(), b"")):
                return True
    return False


def can_box(folder: Path) -> bool:
    nothing = SandboxRun(
        command=("true",),
        directory="/",
        environment={"PATH": os.defpath},
        owner=None,
        inside=str(folder),
        awaited=("nothing", "x"),
        files={},
    )
    return Sandbox().run(nothing).status.ended == "exit"


def wait_until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.02)
