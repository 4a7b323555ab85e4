"""How limits are chosen: a cgroup, a scope of systemd, or none; and a scope through a stand-in for systemd-run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from carma import cgroups
from carma.cgroups import Cgroup, Cgroups
from carma.cli.checks import sharing_checks as sharing
from carma.cli.checks.doctor_facts import DoctorFacts
from carma.trial import kernel_limits
from carma.trial.kernel_limits import KernelLimits, find, systemd_scope
from carma.trial.sandbox import SandboxLimits
from tests.boxes import PATIENCE_S, variant_or_skip
from tests.sandbox.conftest import Guard
from tests.sandbox.programs import FORK_BOMB, Python

COMPLETE = Cgroups(2, {"": "/nowhere"}, frozenset({"pids", "memory"}))
PARTIAL = Cgroups(2, {"": "/nowhere"}, frozenset({"pids"}), "the controller memory is not available")
SCOPE = ("/usr/bin/systemd-run", "--scope")
# Does what systemd does: a cgroup with the limits, then the command in the same process.
SYSTEMD_RUN = """#!/bin/sh
echo "$@" >> {folder}/calls
while [ "$1" != -- ]; do
    case "$1" in
        TasksMax=*) echo "${{1#TasksMax=}}" > {pids}/pids.max ;;
    esac
    shift
done
shift
for directory in {directories}; do echo 0 > "$directory/cgroup.procs"; done
exec "$@"
"""


def no_search() -> Cgroups | str:
    raise AssertionError("where a scope works, no cgroup is looked for and no controller is enabled")


def test_a_scope_comes_first() -> None:
    assert find(no_search, SCOPE, lambda _: True) == KernelLimits(scope=(*SCOPE, "-p", "OOMPolicy=continue"))


@pytest.mark.parametrize("knows_policy", [True, False])
def test_a_scope_is_not_stopped_when_memory_runs_out_in_it_where_systemd_can_be_told(
    tmp_path: Path, knows_policy: bool
) -> None:
    """Otherwise systemd ends the supervisor before it can report that memory was the reason."""
    program = tmp_path / "systemd-run"
    refuse = "" if knows_policy else 'case "$*" in *OOMPolicy*) exit 1 ;; esac\n'
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n{refuse}exit 0\n')
    program.chmod(0o755)
    scope = (str(program), "--scope")
    policy = ("-p", "OOMPolicy=continue")
    expected = (*scope, *policy) if knows_policy else scope
    found = find(no_search, scope, kernel_limits._scope_works)
    assert found.scope == expected
    assert found.prefix(10, 1 << 20)[: len(expected) + 1] == (*expected, "-p")
    assert [("OOMPolicy=continue" in call) for call in (tmp_path / "calls").read_text().splitlines()] == (
        [True] if knows_policy else [True, False]
    )


def test_a_cgroup_with_both_limits_is_used_where_systemd_does_not_run() -> None:
    assert find(lambda: COMPLETE, "no systemd", lambda _: True) == KernelLimits(groups=COMPLETE)


def test_a_scope_that_does_not_work_is_not_used() -> None:
    found = find(lambda: PARTIAL, SCOPE, lambda _: False)
    assert (found.groups, found.scope, found.complete) == (PARTIAL, None, False)
    assert found.problem == PARTIAL.problem


def test_without_any_the_problem_is_told() -> None:
    found = find(lambda: "no cgroups here", "no systemd", lambda _: True)
    assert (found.complete, found.problem) == (False, "no cgroups here")


def test_systemd_is_asked_only_where_it_runs(tmp_path: Path) -> None:
    program = tmp_path / "systemd-run"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    environ = {"PATH": str(tmp_path)}
    assert isinstance(systemd_scope(environ, systemd=str(tmp_path / "missing")), str)
    assert isinstance(systemd_scope({"PATH": "/nowhere"}, systemd=str(tmp_path)), str)


@pytest.mark.parametrize("uid", [0, 1000])
def test_an_ordinary_user_asks_their_own_manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    program = tmp_path / "systemd-run"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    environ = {"PATH": str(tmp_path)}
    without = systemd_scope(environ, systemd=str(tmp_path))
    assert isinstance(without, tuple) == (uid == 0)
    (tmp_path / "systemd").mkdir()
    (tmp_path / "systemd" / "private").touch()
    found = systemd_scope(environ | {"XDG_RUNTIME_DIR": str(tmp_path)}, systemd=str(tmp_path))
    assert isinstance(found, tuple)
    assert found[0] == str(program)
    assert ("--user" in found) == (uid != 0)
    assert "--scope" in found


def test_a_scope_is_tried_before_it_is_used(tmp_path: Path) -> None:
    fails, works = tmp_path / "fails", tmp_path / "works"
    for program, code in ((fails, 1), (works, 0)):
        program.write_text(f"#!/bin/sh\nexit {code}\n")
        program.chmod(0o755)
    assert not kernel_limits._scope_works((str(fails),))
    assert kernel_limits._scope_works((str(works),))
    assert not kernel_limits._scope_works((str(tmp_path / "missing"),))


@pytest.fixture
def scoped(folder: Path, guard: Guard) -> Cgroup:
    """The cgroup that the stand-in for systemd-run joins; it goes with the guard."""
    group = guard.below.create("scope")
    program = folder / "systemd-run"
    directories = " ".join(group.directories)
    program.write_text(SYSTEMD_RUN.format(folder=folder, pids=group.directories[0], directories=directories))
    program.chmod(0o755)
    return group


def test_a_scope_limits_processes(folder: Path, scoped: Cgroup, python: Python) -> None:
    scope = (str(folder / "systemd-run"), "--scope", "--quiet")
    variant = variant_or_skip("self", KernelLimits(scope=scope))
    limits = SandboxLimits(seconds=PATIENCE_S, processes=100, memory_mib=512)
    ended = variant.run("", folder, command=python.command(FORK_BOMB), limits=limits)
    assert ended.status.ended == "processes", ended.status
    assert (folder / "calls").read_text().split()[:7] == [
        "--scope",
        "--quiet",
        "-p",
        "TasksMax=102",
        "-p",
        f"MemoryMax={512 << 20}",
        "-p",
    ]
    assert scoped.members() == []


def test_cgroups_that_a_dead_process_left_are_removed() -> None:
    groups = cgroups.find()
    if isinstance(groups, str):
        pytest.skip(groups)
    name = f"box-{2**22 + 1}-1"  # above the largest pid
    groups.create(name)
    with KernelLimits(groups=groups).cgroup(10, 1 << 30):
        assert groups.open(name) is None
        own = [found for found in groups.names() if found.startswith(f"box-{os.getpid()}-")]
        assert len(own) == 1
    assert groups.open(own[0]) is None


class Machine(DoctorFacts):
    """A machine without a daemon and without GPUs."""

    def __init__(self, sources: Sequence[str] = ("trace",), virtual: int = 0) -> None:
        self.server = None
        self.virtual = virtual
        self.sources = list(sources)

    def setting(self, name: str, default: object) -> object:
        return self.sources if name == "memory.sources" else default


@pytest.mark.parametrize(
    ("found", "verdict", "words"),
    [
        (KernelLimits(groups=COMPLETE), "ok", "cgroups version 2"),
        (KernelLimits(scope=SCOPE), "ok", "systemd-run --scope"),
        (KernelLimits(groups=PARTIAL, problem=PARTIAL.problem), "warn", "cgroups version 2"),
        (KernelLimits(problem="not delegated"), "warn", "RLIMIT_NPROC"),
    ],
)
def test_the_doctor_says_which_limits_the_kernel_enforces(
    monkeypatch: pytest.MonkeyPatch, found: KernelLimits, verdict: str, words: str
) -> None:
    monkeypatch.setattr(kernel_limits, "survey", lambda *_: found)
    finding = sharing.trial_runs(Machine())
    assert finding is not None
    assert (finding.verdict, finding.hint) == (verdict, found.problem)
    assert words in finding.text


def test_the_doctor_is_silent_where_no_trials_are_made() -> None:
    assert sharing.trial_runs(Machine(virtual=2)) is None
    assert sharing.trial_runs(Machine(sources=["declared"])) is None


def test_a_survey_of_another_process_says_what_there_is_or_why_not() -> None:
    found = kernel_limits.survey(os.environ, os.getppid())
    assert found.complete or found.problem
