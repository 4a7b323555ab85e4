"""A file system that hangs delays a trial run by a fixed time, and the reason names it. Needs root, for FUSE."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from carma.core.model.values import NoEstimate, Owner, TaskId, TaskSpec
from carma.core.ports import EstimateRequest
from carma.trial import fingerprint as looking
from carma.trial import sandbox
from carma.trial.fingerprint import Unanswered, fingerprint
from carma.trial.kernel_limits import KernelLimits
from carma.trial.sandbox import SandboxLimits, SandboxResult
from carma.trial.trial_run import TrialRuns
from tests.boxes import PATIENCE_S, VARIANTS, SandboxVariant, marker, processes_with, variant_or_skip, wait_until
from tests.hanging_fs import HangingMount, hanging_mount

ANSWER_S = 1.0
SHORT_GRACE_S = 3.0  # the supervisor waits up to 2 s for processes that cannot end
# Mounts are not asked whether they answer: as if they began to hang just afterwards.
NOT_ASKED = "namespaces.answers = lambda paths, limit_s: dict.fromkeys(paths, 0)"
LATE_S = 10.0  # beyond what is guaranteed, for a machine that is busy


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Iterator[SandboxVariant]:
    made = variant_or_skip(request.param, KernelLimits())
    yield made
    made.sandbox.close()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "ANSWER_LIMIT_S", ANSWER_S)
    monkeypatch.setattr(sandbox, "GRACE_S", SHORT_GRACE_S)
    monkeypatch.setattr(looking, "LIMIT_S", ANSWER_S)
    monkeypatch.setattr("carma.trial.trial_run.LIMIT_S", ANSWER_S)


@pytest.fixture
def elsewhere(folder: Path) -> Iterator[HangingMount]:
    """A mount that the command has nothing to do with."""
    (folder / "elsewhere").mkdir()
    with hanging_mount(folder / "elsewhere") as mount:
        yield mount


@pytest.fixture
def work(folder: Path) -> Iterator[HangingMount]:
    """The working directory."""
    with hanging_mount(folder / "work") as mount:
        yield mount


def in_time(ended: SandboxResult, limits: SandboxLimits) -> bool:
    return ended.seconds < limits.seconds + SHORT_GRACE_S + LATE_S


def test_a_working_directory_that_hangs_is_named(variant: SandboxVariant, folder: Path, work: HangingMount) -> None:
    work.hang()
    ended = variant.run("true", folder)
    assert (ended.status.ended, ended.status.why) == ("unanswered", str(folder / "work"))
    assert ended.status.limit_s == ANSWER_S


def test_a_working_directory_whose_server_has_gone_is_named(
    variant: SandboxVariant, folder: Path, work: HangingMount
) -> None:
    work.abort()
    ended = variant.run("true", folder)
    assert ended.status.ended == "not_started"
    assert str(folder / "work") in ended.status.why


def test_a_mount_elsewhere_that_hangs_is_left_out(
    variant: SandboxVariant, folder: Path, elsewhere: HangingMount
) -> None:
    elsewhere.hang()
    for _ in range(2):  # the second time it is not asked again
        ended = variant.run(f"ls -A {elsewhere.path}; echo end > file && cat file", folder)
        assert (ended.status.ended, ended.status.stdout) == ("exit", "end\n"), ended.status
        assert ended.status.unanswered == [str(elsewhere.path)]


def test_a_mount_elsewhere_whose_server_has_gone_is_left_out(
    variant: SandboxVariant, folder: Path, elsewhere: HangingMount
) -> None:
    elsewhere.abort()
    ended = variant.run("echo end", folder)
    assert (ended.status.ended, ended.status.stdout, ended.status.unanswered) == ("exit", "end\n", [])


def test_a_mount_that_answers_can_be_used(variant: SandboxVariant, folder: Path, elsewhere: HangingMount) -> None:
    ended = variant.run(f"cd {elsewhere.path} && ls -A && echo end", folder)
    assert (ended.status.stdout, ended.status.unanswered) == ("end\n", [])


def test_a_command_inside_a_mount_that_hangs_ends_at_its_limit(
    variant: SandboxVariant, folder: Path, elsewhere: HangingMount
) -> None:
    """The command cannot be killed: the caller abandons it."""
    limits = SandboxLimits(seconds=4)
    word = marker()
    script = f"echo begun > /run/carma/out/steps; while :; do ls {elsewhere.path}; done"

    def hang() -> None:
        wait_until(lambda: bool(processes_with(word)), "the command never started")
        elsewhere.hang()

    hanging = threading.Thread(target=hang)
    hanging.start()
    ended = variant.run("", folder, command=("/bin/sh", "-c", script, word), limits=limits)
    hanging.join()
    assert ended.status.ended == "time", ended.status
    assert ended.status.notes == {"steps": "begun"}
    assert in_time(ended, limits)


def test_a_sandbox_that_cannot_be_built_in_time_names_what_it_waits_for(
    variant: SandboxVariant, folder: Path, elsewhere: HangingMount
) -> None:
    variant.change(NOT_ASKED)
    limits = SandboxLimits(seconds=2)
    elsewhere.hang()
    ended = variant.run("true", folder, limits=limits)
    assert (ended.status.ended, ended.status.why) == ("unanswered", str(elsewhere.path)), ended.status
    assert ended.status.limit_s == limits.seconds + SHORT_GRACE_S
    assert in_time(ended, limits)


def test_a_server_that_goes_while_the_sandbox_is_built_is_left_out(
    variant: SandboxVariant, folder: Path, elsewhere: HangingMount
) -> None:
    variant.change(NOT_ASKED)
    elsewhere.abort()
    ended = variant.run("echo end", folder)
    assert (ended.status.ended, ended.status.stdout) == ("exit", "end\n"), ended.status


def request_in(directory: Path, owner: Owner) -> EstimateRequest:
    spec = TaskSpec(command=(sys.executable, "train.py"), directory=str(directory), environment={"PATH": os.defpath})
    return EstimateRequest(task=TaskId(1), owner=owner, spec=spec, gpus=())


def test_an_estimate_says_which_path_did_not_answer(work: HangingMount, tmp_path: Path) -> None:
    variant_or_skip("self")
    work.hang()
    answer = TrialRuns(tmp_path, limit_s=PATIENCE_S).run(request_in(work.path, Owner(0, 0, "root")))
    assert isinstance(answer, NoEstimate)
    assert answer.reason.startswith(f"{work.path}")
    assert "did not answer within 1 s; it may be on a network drive that hangs" in answer.reason
    assert "namespaces" not in answer.reason


def test_processes_that_hang_are_limited_for_each_user(work: HangingMount, folder: Path) -> None:
    owner = Owner(65533, 65533, "other")
    work.hang()
    request = request_in(work.path, owner)
    deadline = time.monotonic() + PATIENCE_S
    # On a busy machine, a process may be ended before it reached the file system: it ends, and is not counted.
    while looking._stuck_of(owner.uid) < looking.STUCK_LIMIT and time.monotonic() < deadline:
        with pytest.raises(Unanswered, match="work"):
            fingerprint(request)
    stuck = list(looking._stuck[owner.uid])
    assert len(stuck) == looking.STUCK_LIMIT
    for _ in range(2):
        with pytest.raises(Unanswered, match="work"):
            fingerprint(request)
    assert looking._stuck[owner.uid] == stuck  # no further process was started
    good = folder / "good"
    good.mkdir()
    assert fingerprint(request_in(good, Owner(0, 0, "root"))) is not None  # another user's
    work.resume()
    wait_until(lambda: looking._stuck_of(owner.uid) == 0, "a process did not end")
    assert fingerprint(request) is not None
