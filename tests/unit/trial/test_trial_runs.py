"""Trial runs through a real box and a real interpreter, with a stand-in for our part inside it."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from carma.core.model.values import ArrayPlace, NoEstimate, Owner, TaskId, TaskSpec
from carma.core.ports import EstimateRequest
from carma.trial.cards import as_gpu, find_card
from carma.trial.protocol import Trial
from carma.trial.report import TrialReport
from carma.trial.sandbox import SandboxLimits, SandboxStatus
from carma.trial.trial_cache import REFUSAL_S, TrialCache
from carma.trial.trial_environment import trial_environment
from carma.trial.trial_reasons import Kind, advice, isolating_flag, kind_of, no_trial
from carma.trial.trial_run import TrialRuns
from tests.boxes import PATIENCE_S, variant_or_skip
from tests.golden_text import assert_wording
from tests.trials import report

# What ours does: a report when the script asks for it. `warnings` tells one run from another.
_HOOK = """
import builtins, json, os, uuid
OUT = os.environ["CARMA_TRACE_OUT"]
def report(stop, **more):
    with open(OUT + "/events.bin", "wb") as file:
        file.write(b"e" * 48)
    body = {"format": 1, "stop": stop, "steps": 3, "warnings": [uuid.uuid4().hex], **more}
    with open(OUT + "/part", "w") as file:
        json.dump(body, file)
    os.replace(OUT + "/part", OUT + "/report.json")
def steps(count):
    with open(OUT + "/steps", "w") as file:
        file.write(str(count))
builtins.report, builtins.steps = report, steps
"""


class Bench:
    """A folder with a script `train.py`, and trials of it."""

    def __init__(self, folder: Path) -> None:
        self.work = folder / "work"
        self.work.mkdir()
        self.inside = folder / "inside"
        (self.inside / "hook").mkdir(parents=True)
        (self.inside / "hook" / "sitecustomize.py").write_text(_HOOK)
        self.cache = folder / "cache"
        self.runs = self.fresh()

    def fresh(self, **limits: float) -> TrialRuns:
        limit_s = limits.get("limit_s", PATIENCE_S)
        return TrialRuns(self.cache, limit_s=limit_s, memory_mib=4096, inside=self.inside)

    def request(self, script: str, *words: str, **environment: str) -> EstimateRequest:
        if script:
            (self.work / "train.py").write_text(script)
        command = words or (sys.executable, "train.py")
        variables = {"PATH": os.environ.get("PATH", os.defpath), **environment}
        spec = TaskSpec(command=command, directory=str(self.work), environment=variables)
        card = find_card("h200")
        assert card is not None
        owner = Owner(os.geteuid(), os.getegid(), "root" if os.geteuid() == 0 else "me")
        return EstimateRequest(task=TaskId(1), owner=owner, spec=spec, gpus=(as_gpu(card),))

    def refusal(self, script: str, *words: str) -> str:
        answer = self.runs.run(self.request(script, *words))
        assert isinstance(answer, NoEstimate), answer
        assert answer.source == "trace"
        return answer.reason

    def trial(self, request: EstimateRequest, runs: TrialRuns | None = None) -> Trial:
        answer = (runs or self.runs).run(request)
        assert isinstance(answer, Trial), answer
        return answer


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    variant_or_skip("self")
    return Bench(tmp_path)


def test_a_report_after_enough_steps_is_a_trial(bench: Bench) -> None:
    trial = bench.trial(bench.request("report('steps'); import time; time.sleep(10_000)"))
    assert (trial.report.stop, trial.report.steps, trial.events) == ("steps", 3, b"e" * 48)


def test_a_report_of_another_kind_is_passed_on_when_the_command_has_ended(bench: Bench) -> None:
    trial = bench.trial(bench.request("report('error', reason='no such file'); raise SystemExit(1)"))
    assert (trial.report.stop, trial.report.reason) == ("error", "no such file")


def test_a_later_report_that_counts_replaces_a_helpers(bench: Bench) -> None:
    (bench.work / "helper.py").write_text("report('end')")
    script = "import subprocess, sys; subprocess.run([sys.executable, 'helper.py'], check=True); report('steps')"
    assert bench.trial(bench.request(script)).report.stop == "steps"


def test_the_environment_that_a_script_finds(bench: Bench) -> None:
    script = "import json, os; report('end', reason=json.dumps(dict(os.environ)))"
    extra = {
        "SSH_AUTH_SOCK": "/x",
        "CARMA_HOME": "/y",
        "MY_SETTING": "1",
        "WANDB_MODE": "online",
        "PYTHONPATH": "/mine",
    }
    found = msgspec.json.decode(bench.trial(bench.request(script, **extra)).report.reason, type=dict[str, str])
    assert found["MY_SETTING"] == "1"
    assert found["WANDB_MODE"] == "disabled"
    assert found["CUDA_VISIBLE_DEVICES"] == ""
    assert found["PYTHONPATH"].endswith("/hook:/mine")
    assert "SSH_AUTH_SOCK" not in found
    assert "CARMA_HOME" not in found
    gpu = msgspec.json.decode(found["CARMA_TRACE_GPU"])
    assert (gpu["name"], gpu["capability"], gpu["count"]) == ("NVIDIA H200", [9, 0], 1)


def test_the_index_in_an_array_is_in_the_trial_environment(bench: Bench) -> None:
    request = bench.request("")
    slurm = {"SLURM_CPUS_PER_TASK": "4"}
    spec = msgspec.structs.replace(request.spec, array=ArrayPlace(TaskId(5), 7), slurm=slurm)
    found = trial_environment(msgspec.structs.replace(request, spec=spec), 3)
    assert (found["SLURM_ARRAY_TASK_ID"], found["CARMA_ARRAY_ID"]) == ("7", "5")
    assert (found["SLURM_CPUS_PER_TASK"], found["SLURM_JOB_ID"]) == ("4", str(request.task))


def test_an_early_end_is_reported_with_its_last_line_of_output(bench: Bench) -> None:
    reason = bench.refusal("steps(0); import sys; sys.exit('there is no dataset')")
    assert "exit code 1 before its first optimizer step" in reason
    assert reason.endswith("there is no dataset")


def test_an_exit_without_a_reason_is_reported_with_the_last_line_of_the_error_output(bench: Bench) -> None:
    script = "import sys; print('usage: x', file=sys.stderr); print('x: error: --batc', file=sys.stderr)\n"
    ended = "the script exited with code 2 before an optimizer step"
    for reason, more in ((ended, ": x: error: --batc"), (f"{ended}: no data", "")):
        trial = bench.trial(bench.request(f"{script}report('error', cause='crashed', reason={reason!r})"))
        assert trial.report.reason == reason + more


def test_a_command_without_torch_a_flag_and_a_missing_program_are_named(bench: Bench) -> None:
    assert "no Python process that CARMA can observe" in bench.refusal("", "/bin/sh", "-c", "exit 0")
    assert "-I" in bench.refusal("pass", sys.executable, "-I", "train.py")
    assert "no-such-program" in bench.refusal("", "no-such-program")


def test_the_reason_at_the_time_limit_contains_the_limit(bench: Bench) -> None:
    bench.runs = bench.fresh(limit_s=1.0)
    assert "1 s" in bench.refusal("", "/bin/sh", "-c", "sleep 100000")


def test_an_unreadable_report_is_a_refusal(bench: Bench) -> None:
    assert "cannot be read" in bench.refusal("report('steps', no_such_field=1)")


def test_the_same_question_is_run_once_and_remembered_on_disk(bench: Bench) -> None:
    request = bench.request("report('steps')")
    first = bench.trial(request)
    assert bench.trial(request).report == first.report
    assert bench.trial(request, bench.fresh()).report == first.report
    changed = bench.trial(bench.request("report('steps') # other"), bench.fresh())
    assert changed.report != first.report


def test_another_version_of_our_part_makes_a_new_trial(bench: Bench) -> None:
    request = bench.request("report('steps')")
    first = bench.trial(request)
    other = bench.inside.parent / "inside2"
    bench.inside.rename(other)
    (other / "hook" / "more.py").write_text("")
    bench.inside = other
    assert bench.trial(request, bench.fresh()).report != first.report


def test_those_who_ask_at_the_same_time_share_one_run(bench: Bench) -> None:
    request = bench.request("report('steps')")
    found: list[TrialReport] = []
    threads = [threading.Thread(target=lambda: found.append(bench.trial(request).report)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(found) == 3
    assert found[0] == found[1] == found[2]


def test_the_model_or_the_reason_for_its_absence_is_reported(bench: Bench) -> None:
    described = bench.runs.describe(bench.request("report('steps', described={'layers': [], 'batch': 4})"))
    assert not isinstance(described, NoEstimate)
    assert described.batch == 4
    nothing = bench.runs.describe(bench.request("report('steps')"))
    assert isinstance(nothing, NoEstimate)


def _trial(number: int) -> Trial:
    return Trial(report=TrialReport(format=1, stop="steps", steps=number), events=b"x" * 24, seconds=1.0)


def test_a_refusal_is_forgotten_after_a_while(tmp_path: Path) -> None:
    now = 100.0
    cache = TrialCache(tmp_path, clock=lambda: now)
    refusal = NoEstimate(source="trace", reason="no")
    cache.put("a", refusal)
    assert cache.get("a") == refusal
    now += REFUSAL_S + 1
    assert cache.get("a") is None
    assert TrialCache(tmp_path).get("a") is None


def test_a_damaged_file_is_no_trial_and_goes(tmp_path: Path) -> None:
    TrialCache(tmp_path).put("a", _trial(3))
    (path,) = tmp_path.iterdir()
    assert TrialCache(tmp_path).get("a") == _trial(3)
    path.write_bytes(path.read_bytes()[:-5])
    assert TrialCache(tmp_path).get("a") is None
    assert list(tmp_path.iterdir()) == []


def test_the_longest_unused_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carma.trial.trial_cache.ENTRIES", 2)
    cache = TrialCache(tmp_path)
    for number, name in enumerate("abc"):
        cache.put(name, _trial(number))
        if (tmp_path / f"{name}.trial").exists():
            os.utime(tmp_path / f"{name}.trial", (number, number))
    assert [cache.get(name) for name in "abc"] == [None, _trial(1), _trial(2)]


NUMBERS = SandboxLimits(seconds=9, memory_mib=100, processes=7)
READ_ONLY = "OSError: [Errno 30] Read-only file system"
ENDINGS: dict[str, tuple[SandboxStatus, Kind | None]] = {
    "time, before torch": (SandboxStatus(ended="time", notes={"steps": None}), "no_torch"),
    "time, before a step": (SandboxStatus(ended="time", notes={"steps": "0"}), "time"),
    "time, after steps": (SandboxStatus(ended="time", notes={"steps": "2"}), "time"),
    "time, a mount left out": (SandboxStatus(ended="time", unanswered=["/mnt/x"]), "no_torch"),
    "memory": (SandboxStatus(ended="memory"), "memory"),
    "memory, perhaps of others": (SandboxStatus(ended="memory", why="90 MiB of it may be shared memory"), "memory"),
    "processes": (SandboxStatus(ended="processes"), None),
    "not started": (SandboxStatus(ended="not_started", why="x was not found in PATH"), "crashed"),
    "exit code": (SandboxStatus(ended="exit", code=2, stdout="a", stderr="b\nc\n"), "crashed"),
    "exit code 0": (SandboxStatus(ended="exit", notes={"steps": "1"}, stdout="done"), None),
    "without torch": (SandboxStatus(ended="exit"), None),
    "signal": (SandboxStatus(ended="exit", code=-11, notes={"steps": "1"}), "crashed"),
    "unknown signal": (SandboxStatus(ended="exit", code=-99, notes={"steps": "1"}), "crashed"),
    "read-only": (SandboxStatus(ended="exit", code=1, stderr=READ_ONLY, read_only=["/mnt/x"]), None),
    "failed": (SandboxStatus(ended="failed", why="no memory"), None),
    "unanswered": (SandboxStatus(ended="unanswered", why="/mnt/x", limit_s=10.0), None),
    "abandoned": (SandboxStatus(ended="abandoned"), None),
    "lost": (SandboxStatus(ended="lost"), None),
    "lost, with its last words": (SandboxStatus(ended="lost", why="MemoryError"), None),
}


def test_each_ending_has_its_kind_and_its_sentence() -> None:
    found = {name: no_trial(status, ("python", "x.py"), NUMBERS) for name, (status, _) in ENDINGS.items()}
    assert {name: kind_of(each) for name, each in found.items()} == {name: kind for name, (_, kind) in ENDINGS.items()}
    assert_wording("trial_reasons", {name: each.reason for name, each in found.items()})


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (
            "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes",
            "memory",
        ),
        ("ValueError: no such model", "crashed"),
    ],
)
def test_a_script_that_the_hosts_memory_stopped_gets_no_advice_about_a_gpu(reason: str, kind: Kind) -> None:
    crashed = msgspec.structs.replace(report(), cause="crashed", reason=reason)
    assert kind_of(Trial(report=crashed, events=b"", seconds=1.0)) == kind


def test_a_sandbox_that_is_not_allowed_names_the_call_that_the_kernel_refused() -> None:
    refused = no_trial(
        SandboxStatus(ended="refused", why="making namespaces: Operation not permitted"), ("x",), NUMBERS
    )
    assert (refused.source, refused.kind) == ("trace", None)
    assert "(making namespaces: Operation not permitted)" in refused.reason


def test_a_flag_that_keeps_our_part_out_is_no_crash_of_the_script() -> None:
    flagged = no_trial(SandboxStatus(ended="exit", code=1), ("python", "-I", "x.py"), NUMBERS)
    assert flagged.kind is None
    assert "-I" in flagged.reason


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("python -I x.py", "-I"),
        ("/usr/bin/python3.11 -uE x.py", "-uE"),
        ("env A=1 python -s -E -m x", "-E"),
        ("python x.py -I", None),
        ("python -m x -E", None),
        ("bash -E x.sh", None),
    ],
)
def test_flags_that_ignore_the_environment_are_found(command: str, flag: str | None) -> None:
    assert isolating_flag(command.split()) == flag


def test_the_advice_names_the_switch_that_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    (tmp_path / "kernel").mkdir()
    (tmp_path / "kernel" / "apparmor_restrict_unprivileged_userns").write_text("1\n")
    assert "kernel.apparmor_restrict_unprivileged_userns=0" in advice(tmp_path)
