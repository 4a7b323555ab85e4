"""What a trial is remembered by: equal where the same would come out, different where it might not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import pytest

from carma.core.model.values import Owner, TaskId, TaskSpec
from carma.core.ports import EstimateRequest
from carma.trial.fingerprint import fingerprint
from tests.boxes import NOBODY, folder_for_all, own

open_folder = pytest.fixture(folder_for_all)


def mark(folder: Path, *words: str, owner: Owner | None = None, **environment: str) -> str:
    variables = {"PATH": os.environ.get("PATH", os.defpath), **environment}
    spec = TaskSpec(command=words or (sys.executable, "train.py"), directory=str(folder), environment=variables)
    owner = owner or Owner(os.geteuid(), os.getegid(), "root" if os.geteuid() == 0 else "me")
    found = fingerprint(EstimateRequest(task=TaskId(1), owner=owner, spec=spec, gpus=()))
    assert found is not None
    return found


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("train.py", "model/net.py", "conf/a.yaml", "outputs/config.yaml", "data/x.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


@pytest.mark.parametrize("name", ["train.py", "model/net.py", "conf/a.yaml"])
def test_a_changed_source_is_another(project: Path, name: str) -> None:
    before = mark(project)
    assert mark(project) == before
    (project / name).write_text("changed!")
    assert mark(project) != before


@pytest.mark.parametrize("name", ["outputs/config.yaml", "data/x.json", "notes.txt"])
def test_what_runs_leave_behind_makes_no_difference(project: Path, name: str) -> None:
    before = mark(project)
    (project / name).write_text("changed!")
    assert mark(project) == before


def test_a_file_that_the_command_names_counts_wherever_it_lies(
    project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = tmp_path_factory.mktemp("elsewhere") / "settings.txt"
    settings.write_text("batch 4")
    words = (sys.executable, "train.py", f"--config={settings}", "outputs/config.yaml")
    before = mark(project, *words)
    settings.write_text("batch 8")
    middle = mark(project, *words)
    (project / "outputs" / "config.yaml").write_text("other")
    assert len({before, middle, mark(project, *words)}) == 3


def test_arguments_owner_and_settings_count(project: Path) -> None:
    request = EstimateRequest(
        task=TaskId(1),
        owner=Owner(0, 0, "root"),
        spec=TaskSpec(command=("python", "train.py"), directory=str(project), environment={"A": "1"}),
        gpus=(),
    )
    spec = request.spec
    others = [
        request,
        msgspec.structs.replace(request, spec=msgspec.structs.replace(spec, command=("python", "train.py", "-b", "8"))),
        msgspec.structs.replace(request, spec=msgspec.structs.replace(spec, environment={"A": "2"})),
        msgspec.structs.replace(request, spec=msgspec.structs.replace(spec, directory=str(project / "model"))),
    ]
    assert len({fingerprint(one) for one in others}) == len(others)


def test_the_login_makes_no_difference(project: Path) -> None:
    noise = {"PWD": "/x", "SHLVL": "3", "SSH_TTY": "/dev/pts/3", "TERM": "xterm", "DISPLAY": ":1", "CARMA_HOME": "/y"}
    assert mark(project, owner=None, **noise) == mark(project)
    assert mark(project, LEARNING_RATE="1") != mark(project)


def test_the_job_and_the_container_make_no_difference(project: Path) -> None:
    noise = dict.fromkeys(
        ("SLURM_JOB_ID", "SLURM_NODELIST", "SLURMD_NODENAME", "LSB_JOBID", "PBS_JOBID", "JOB_ID"), "1"
    )
    noise |= dict.fromkeys(("SGE_ROOT", "WANDB_RUN_ID", "KUBERNETES_PORT", "HOSTNAME", "LS_COLORS", "TMUX_PANE"), "2")
    assert mark(project, owner=None, **noise) == mark(project)


@pytest.mark.parametrize(
    "name",
    [
        "SLURM_ARRAY_TASK_ID",
        "SLURM_PROCID",
        "LSB_JOBINDEX",
        "PBS_ARRAY_INDEX",
        "PBS_ARRAYID",
        "SGE_TASK_ID",
        "SLURMISH",
    ],
)
def test_a_place_in_an_array_or_among_ranks_counts(project: Path, name: str) -> None:
    assert mark(project, owner=None, **{name: "1"}) != mark(project, owner=None, **{name: "2"})


def test_a_package_installed_beside_the_interpreter_counts(project: Path) -> None:
    packages = project / "venv" / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    (project / "venv" / "bin").mkdir()
    (project / "venv" / "bin" / "python").symlink_to(sys.executable)
    before = mark(project, "venv/bin/python", "train.py")
    os.utime(packages, (1, 1))
    assert mark(project, "venv/bin/python", "train.py") != before


def test_pipes_devices_and_loops_are_passed_over(project: Path) -> None:
    os.mkfifo(project / "pipe.py")
    (project / "loop").symlink_to(project)
    (project / "self.py").symlink_to("self.py")
    assert mark(project, "python", "train.py", "/dev/zero", "pipe.py", "\0", "self.py")


def test_a_fingerprint_ignores_files_that_the_owner_cannot_read(open_folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root and another user")
    secret = open_folder / "work" / "secret.py"
    secret.write_text("one")
    secret.chmod(0o600)
    words = ("/bin/sh", "secret.py")
    hidden = mark(open_folder / "work", *words, owner=NOBODY)
    secret.write_text("two")
    assert mark(open_folder / "work", *words, owner=NOBODY) == hidden
    own(secret, NOBODY)
    assert mark(open_folder / "work", *words, owner=NOBODY) != hidden
