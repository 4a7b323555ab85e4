"""`carma estimate`: who is asked for what, what is printed, and what is said of a mistake."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

import carma.estimate
from carma.cli import estimate_target, estimating, main
from carma.cli.checks.look import Found
from carma.config.tree import Settings
from carma.core.model import Estimate, Gpu, GpuId, NoEstimate
from carma.core.ports import EstimateRequest, Estimator
from carma.core.settings import Memory, Rules
from carma.errors import NoGpus
from carma.estimate.described import Described
from carma.estimate.protocol import Context, Trial, Trials
from carma.estimate.registry import make_estimator
from carma.estimate.trace.estimator import why_not
from carma.estimate.trace.report import Report
from carma.estimate.trace.sandbox import Boxed, Ending, Limits, Sandbox, Status
from carma.estimate.trace.trial_reasons import NEVER, reason_for

LIMIT_S = 60.0
# A test runner that was started in the background has SIGINT ignored, and children inherit that.
WITH_INTERRUPTS = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from carma.cli import main
sys.exit(main(sys.argv[1:]))
"""
ANSWER = Estimate(
    footprint_mib=5_000,
    upper_mib=5_427,
    source="trace",
    level=0.99,
    allocated_mib=3_900,
    reserved_mib=4_240,
    steps_seen=3,
    parts_mib={"weights": 400, "optimizer_state": 800, "context": 760},
    warnings=("torch.compile was not followed",),
)
LOCAL = Gpu(id=GpuId("GPU-11112222"), index=0, name="NVIDIA A30", memory_mib=24_000)
SECOND = Gpu(id=GpuId("GPU-33334444"), index=1, name="NVIDIA Prototype", memory_mib=9_000)
NAMES = {
    *("estimator", "gpu", "allocated_mib", "reserved_mib", "footprint_mib", "bound_mib", "level", "steps_seen"),
    *("took_s", "warnings", "parts_mib"),
}


class ScriptedTrials:
    """Counts how often a command is really run."""

    def __init__(self, answer: Trial | NoEstimate) -> None:
        self.answer = answer
        self.runs: list[EstimateRequest] = []

    def run(self, request: EstimateRequest) -> Trial | NoEstimate:
        self.runs.append(request)
        return self.answer

    def describe(self, request: EstimateRequest) -> Described | NoEstimate:  # noqa: ARG002
        return Described(layers=(), batch=8)


class Scripted:
    """An estimator: what it says is decided by a function of its Context."""

    def __init__(self, name: str, context: Context, say: Callable[[Context, EstimateRequest], Any]) -> None:
        self.name = name
        self._context = context
        self._say = say

    def estimate(self, request: EstimateRequest) -> Estimate | NoEstimate:
        answer: Estimate | NoEstimate = self._say(self._context, request)
        return answer


class World:
    """The seams of the verb: estimators by name, trial runs, the GPUs of the machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trials = ScriptedTrials(Trial(Report(format=1, stop="steps", steps=3), b"", 1.0))
        self.trials_asked: list[tuple[Rules, int | None]] = []
        self.says: dict[str, Callable[[Context, EstimateRequest], Any]] = {"trace": lambda _c, _r: ANSWER}
        self.requests: list[EstimateRequest] = []
        self.here: tuple[Gpu, ...] = ()
        world = self

        class Machine:
            @property
            def found(self) -> Found:
                return Found(world.here) if world.here else Found(error=NoGpus("none"))

        def make_trials(rules: Rules, _environ: Mapping[str, str], steps: int | None) -> Trials:
            self.trials_asked.append((rules, steps))
            return self.trials

        real = make_estimator

        def make(name: str, context: Context) -> Estimator:
            return Scripted(name, context, self._heard(name)) if name in self.says else real(name, context)

        monkeypatch.setattr(estimate_target, "Look", Machine)
        monkeypatch.setattr(estimating, "make_trials", make_trials)
        monkeypatch.setattr(estimating, "make_estimator", make)
        monkeypatch.setattr(estimating, "names", lambda _group: ("declared", "history", *sorted(self.says)))

    def _heard(self, name: str) -> Callable[[Context, EstimateRequest], Any]:
        def say(context: Context, request: EstimateRequest) -> Any:
            self.requests.append(request)
            return self.says[name](context, request)

        return say


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("CARMA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    return World(monkeypatch)


def printed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["estimate", *words]) == code
    return capsys.readouterr().out


def complained(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
    assert main(["estimate", *words]) == code
    caught = capsys.readouterr()
    assert caught.out == ""
    return caught.err


def figures(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    return json.loads(printed(capsys, "--json", *words, code=code))


# What is asked


def test_the_command_is_asked_about_as_it_would_run_here(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, "--gpu", "h200", "--", "sh", "-c", "exit 0", "--gpu", "x")
    (request,) = world.requests
    assert request.spec.command == ("sh", "-c", "exit 0", "--gpu", "x")
    assert request.spec.directory == os.getcwd()
    assert request.spec.environment == dict(os.environ)
    assert request.owner.uid == os.getuid()
    assert [(gpu.name, gpu.memory_mib) for gpu in request.gpus] == [("NVIDIA H200", 143_155)]


def test_words_without_dashes_are_the_command_too(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, "--gpu", "h200", "sh", "-c", "exit 0", "--", "--json")
    assert world.requests[0].spec.command == ("sh", "-c", "exit 0", "--", "--json")


def test_several_gpus(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--gpu", "h200", "--gpu-count", "2", "--", "sh")
    (request,) = world.requests
    assert request.spec.gpus == len(request.gpus) == len({gpu.index for gpu in request.gpus}) == 2
    assert "each of 2 GPUs (NVIDIA H200)" in text
    assert "carma submit --gpus 2 --gpu-mem 5427M -- sh" in text


def test_several_of_a_gpu_that_is_here_once(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.here = (LOCAL,)
    printed(capsys, "--gpu-count", "3", "--", "sh")
    gpus = world.requests[0].gpus
    assert gpus[0] == LOCAL
    assert len({gpu.id for gpu in gpus}) == len({gpu.index for gpu in gpus}) == 3
    assert {gpu.name for gpu in gpus} == {"NVIDIA A30"}


def test_limits_of_the_trial_are_the_flags(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, "--gpu", "h200", "--limit", "45", "--steps", "5", "--", "sh")
    ((rules, steps),) = world.trials_asked
    assert (rules.memory.trial_limit_s, steps) == (45.0, 5)


def test_limits_of_the_trial_are_the_settings_otherwise(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, "--gpu", "h200", "--", "sh")
    assert world.trials_asked == [(Settings(), None)]


@pytest.mark.skipif("level" not in Memory.__struct_fields__, reason="there is no such setting")
def test_the_level_of_the_bound(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    def by_level(context: Context, _request: EstimateRequest) -> Estimate:
        return msgspec.structs.replace(ANSWER, level=getattr(context.rules.memory, "level", None))

    world.says["trace"] = by_level
    assert figures(capsys, "--gpu", "h200", "--level", "0.95", "--", "sh")["level"] == 0.95


@pytest.mark.parametrize(
    ("wanted", "name", "memory_mib"),
    [
        ((), "NVIDIA A30", 24_000),
        (("--gpu", "1"), "NVIDIA Prototype", 9_000),
        (("--gpu", "GPU-3333"), "NVIDIA Prototype", 9_000),
        (("--gpu", "nvidia prototype"), "NVIDIA Prototype", 9_000),
        (("--gpu", "L4"), "NVIDIA L4", 22_480),
    ],
)
def test_a_gpu_of_this_machine_or_of_the_catalogue(
    world: World, capsys: pytest.CaptureFixture[str], wanted: tuple[str, ...], name: str, memory_mib: int
) -> None:
    world.here = (LOCAL, SECOND)
    assert figures(capsys, *wanted, "--", "sh")["gpu"] == name
    assert world.requests[0].gpus[0].memory_mib == memory_mib


def test_without_a_gpu_it_says_for_which_it_is(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--json", "--", "sh"]) == 0
    caught = capsys.readouterr()
    assert "the estimate is for an NVIDIA H200" in caught.err
    assert json.loads(caught.out)["gpu"] == "NVIDIA H200"
    assert world.requests


# What is answered


def test_json_has_the_promised_names(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    row = figures(capsys, "--gpu", "h200", "--", "sh")
    assert set(row) == NAMES
    assert world.says
    assert row.pop("took_s") >= 0
    assert row == {
        "estimator": "trace",
        "gpu": "NVIDIA H200",
        "allocated_mib": 3_900,
        "reserved_mib": 4_240,
        "footprint_mib": 5_000,
        "bound_mib": 5_427,
        "level": 0.99,
        "steps_seen": 3,
        "warnings": ["torch.compile was not followed"],
        "parts_mib": {"weights": 400, "optimizer_state": 800, "context": 760},
    }


def test_the_answer_comes_first(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "--gpu", "h200", "--", "sh", "a b").splitlines()
    assert lines[0] == "4.9 GiB (at most 5.3 GiB at 99 %) on an NVIDIA H200"
    text = "\n".join(lines)
    for said in ("optimizer state", "3.8 GiB allocated", "3 optimizer steps seen", "torch.compile was not followed"):
        assert said in text
    assert "carma submit --gpu-mem 5427M -- sh 'a b'" in text
    assert "fit" not in text
    assert world.requests


@pytest.mark.parametrize(
    ("footprint_mib", "upper_mib", "said"),
    [(20_000, 22_000, ""), (20_000, 25_000, "it may not fit"), (30_000, 31_000, "it would not fit")],
)
def test_a_card_that_is_too_small(
    world: World, capsys: pytest.CaptureFixture[str], footprint_mib: int, upper_mib: int, said: str
) -> None:
    world.here = (LOCAL,)
    world.says["trace"] = lambda _c, _r: Estimate(footprint_mib=footprint_mib, upper_mib=upper_mib, source="trace")
    text = printed(capsys, "--", "sh")
    assert ("fit" in text) is bool(said)
    assert said in text
    assert ("--gpu-mem" in text) is (footprint_mib < LOCAL.memory_mib)


def test_that_it_does_not_fit_is_said_once(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    warnings = ("it does not fit: NVIDIA A30 has 23.4 GiB", "something else")
    large = Estimate(footprint_mib=30_000, upper_mib=31_000, level=0.99, source="trace", warnings=warnings)
    world.here, world.says["trace"] = (LOCAL,), lambda _c, _r: large
    text = printed(capsys, "--", "sh")
    assert text.count("fit") == 1
    assert "something else" in text
    assert figures(capsys, "--", "sh")["warnings"] == list(warnings)


def test_a_small_model_has_weights_too(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    small = msgspec.structs.replace(ANSWER, allocated_mib=0, parts_mib={"weights": 0, "context": 760})
    world.says["trace"] = lambda _c, _r: small
    text = printed(capsys, "--gpu", "h200", "--", "sh")
    assert " 0 MiB" not in text
    assert text.count("< 1 MiB") == 2
    assert figures(capsys, "--gpu", "h200", "--", "sh")["parts_mib"] == {"weights": 0, "context": 760}


@pytest.mark.parametrize(("seconds", "remembered"), [(6.9e6, True), (0.0, False)])
def test_a_trial_that_was_made_before_is_called_so(
    world: World, capsys: pytest.CaptureFixture[str], seconds: float, remembered: bool
) -> None:
    def by_trial(context: Context, request: EstimateRequest) -> Estimate:
        assert isinstance(context.trials.run(request), Trial)
        return ANSWER

    world.trials.answer = Trial(Report(format=1, stop="steps", steps=3), b"", seconds)
    world.says["trace"] = by_trial
    text = " ".join(printed(capsys, "--gpu", "h200", "--", "sh").split())
    assert ("remembered from an earlier trial run (which took 6900000.0 s)" in text) is remembered
    assert ("it took" in text) is not remembered


def test_who_used_no_trial_remembers_none(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.trials.answer = Trial(Report(format=1, stop="steps", steps=3), b"", 6.9e6)
    assert "it took" in printed(capsys, "--gpu", "h200", "--", "sh")


def test_a_formula_has_no_bound(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.says["plain"] = lambda _c, _r: Estimate(footprint_mib=7_000, upper_mib=7_000, source="plain")
    text = printed(capsys, "--gpu", "t4", "--estimator", "plain", "--", "sh")
    assert text.startswith("6.8 GiB, without a bound, on a Tesla T4\n")
    assert "--gpu-mem" not in text
    row = figures(capsys, "--gpu", "t4", "--estimator", "plain", "--", "sh")
    assert (row["footprint_mib"], row["bound_mib"], row["level"]) == (7_000, None, None)


LIMITS = Limits(seconds=9, memory_mib=100)


def ended(how: Ending, code: int = 0, stderr: str = "") -> NoEstimate:
    status = Status(ended=how, code=code, stderr=stderr)
    return NoEstimate(source="trace", reason=reason_for(status, ("python", "x.py"), LIMITS))


def reported(stop: str, reason: str) -> Trial:
    return Trial(msgspec.convert({"format": 1, "stop": stop, "reason": reason}, Report), b"", 1.0)


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (ended("exit", 2, "can't open file 'x.py'"), "mend it first"),
        (ended("exit", -11), "mend it first"),
        (ended("not_started"), "mend it first"),
        (reported("error", "KeyError: 'a' (x.py:3)"), "mend it first"),
        (reported("error", "OSError: x; a trial run has no network: download it once"), "submit it with --gpu-mem"),
        (reported("end", NEVER), "it needs no GPU memory"),
        (reported("end", "the script ended by itself before an optimizer step"), "submit it with --gpu-mem"),
        (reported("unsupported", "the script captures CUDA graphs"), "submit it with --gpu-mem"),
        (ended("exit", 0), "submit it with --gpu-mem"),
        (ended("time"), "--limit"),
        (ended("memory"), "memory.trial_memory_mib"),
        (ended("refused"), "submit it with --gpu-mem"),
        (NoEstimate(source="trace", reason="the batch size is not known; the formula needs it"), "--batch N"),
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


def test_a_refusal_of_ones_own_gets_no_hint_about_the_trial(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    def picky(context: Context, request: EstimateRequest) -> NoEstimate:
        context.trials.run(request)
        return NoEstimate(source="trace", reason="only for language models")

    world.trials.answer = reported("error", "KeyError: 'a'")
    world.says["trace"] = picky
    assert "submit it with --gpu-mem" in complained(capsys, 1, "--gpu", "h200", "--", "sh")


def test_the_words_for_no_gpu_are_those_that_a_trial_writes() -> None:
    assert f'NEVER = "{NEVER}"' in (Path(carma.estimate.__file__).parent / "inside/carma_trial/report.py").read_text()


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
        (("--batch", "3", "--", "sh"), 2, "--batch belongs to --summary"),
        (("--summary", "x"), 2, "say who is to read it"),
        (("--summary", "missing.txt", "--estimator", "horus"), 1, "missing.txt"),
        (("--limit", "0", "--", "sh"), 2, "at least one second"),
        (("--level", "1.5", "--", "sh"), 2, "between 0.5 and"),
        (("--gpu-count", "0", "--", "sh"), 2, "between 1 and 64"),
    ],
)
def test_what_is_said_of_a_mistake(
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
    naptime = f"{600 + os.getpid() % 97}.{tmp_path.stat().st_ino}"  # nobody else sleeps for exactly so long
    environ = {**os.environ, "CARMA_HOME": str(tmp_path / "home"), "COLUMNS": "100"}
    words = ["estimate", "--gpu", "h200", "--estimator", "horus", "--", "sleep", naptime]
    verb = subprocess.Popen(
        [sys.executable, "-c", WITH_INTERRUPTS, *words], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
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
    nothing = Boxed(
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
