"""What `carma submit` sends, against a daemon that keeps what it got."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from carma.cli import carma
from carma.core.model.values import DEFAULT_NOTICES, Dependency, Notify, SaveSignal, TaskId, WarnSignal
from carma.errors import NeverFitsError, NoCapacity
from carma.wire.api_types import SubmitRequest
from tests.unit.cli.scripted_daemon import NOW, FakeDaemon, finished

OWN_PYTHON = (  # the last two run a module of CARMA, and another program
    (Path(sys.executable).name, "-c", "1"),
    (sys.executable, __file__),
    (sys.executable, "-m", "carma.vgpu.virtual_task"),
    ("sh", "-c", "1"),
)


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    with FakeDaemon() as fake:
        monkeypatch.setenv("CARMA_HOME", str(fake.home))
        yield fake


def call(*words: str, **more: Any) -> Result:
    return CliRunner().invoke(carma, list(words), **more)


def sent(daemon: FakeDaemon, *words: str, **more: Any) -> SubmitRequest:
    result = call("submit", *words, **more)
    assert result.exit_code == 0, result.stderr
    (request,) = daemon.asked("submit")
    assert isinstance(request, SubmitRequest)
    return request


def test_parsable_prints_the_id_alone(daemon: FakeDaemon) -> None:
    flags = ["--gpus", "2", "--gpu-mem", "12GiB", "--exclusive", "--time", "00:10:00"]
    result = call("submit", "--parsable", *flags, "--", "true")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "1\n", "")
    spec = daemon.asked("submit")[0].spec
    assert (spec.gpus, spec.gpu_memory_mib, spec.exclusive, spec.time_limit_s) == (2, 12 * 1024, True, 600.0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu-mem", "3", "--", "true"], "3 MiB, less than the CUDA context of a task; did you mean 3GiB?"),
        (["--gpu-mem", "1.5", "--", "true"], "did you mean 1.5GiB?"),
        (["--gpu-mem", "64M", "--", "true"], "64 MiB, less than"),
        (["--begin", "2020-01-01", "--", "true"], "--begin has passed"),
        (["--gres", "gpu:a100:1", "--", "true"], "GPU type 'a100'"),
        (["--gpus", "a100:1", "--", "true"], "GPU type 'a100'"),
        (["python", "/train.py", "--gpu-mem", "3G"], "--gpu-mem follows python"),
        (["python", "/train.py", "--gpu-mem=3G"], "--gpu-mem follows python"),
        (["--param", "i=1,2", "--", "/x/python3.11", "-u", "-W", "error", "nosuch.py", "{i}"], "nosuch.py"),
    ],
)
def test_a_submission_that_is_surely_meant_otherwise_is_accepted_with_a_note(
    daemon: FakeDaemon, words: list[str], said: str
) -> None:
    result = call("submit", *words)
    assert (result.exit_code, len(daemon.asked("submit"))) == (0, 2 if "--param" in words else 1)
    assert [said in line for line in result.stderr.splitlines() if line.startswith("carma: note: ")].count(True) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--gpu-mem", "4000", "--begin", "now", "--gres", "gpu:2", "--", "true"],
        ["--", "python", "-c", "1", "nosuch.py", "--gpu-mem", "3G"],
        ["--", "python", "-m", "nosuch.py"],
        ["--", "python", "-", "nosuch.py"],
        ["--", "python", __file__],
        ["--", "env", "nosuch.py"],
    ],
)
@pytest.mark.usefixtures("daemon")
def test_usual_submissions_have_no_note(words: list[str]) -> None:
    result = call("submit", *words)
    assert (result.exit_code, result.stderr) == (0, "")


@pytest.mark.usefixtures("daemon")
def test_carmas_own_python_without_a_framework_has_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Path(sys.executable)
    monkeypatch.setenv("PATH", f"{own.parent}:/bin")
    monkeypatch.setattr("carma.cli.submission.FRAMEWORKS", ("no_such_framework",))
    noted = ["carma: note: " in call("submit", "--", *words).stderr for words in OWN_PYTHON]
    assert noted == [True, True, False, False]
    monkeypatch.setattr("carma.cli.submission.FRAMEWORKS", ("no_such_framework", "click"))
    assert call("submit", "--", own.name, "-c", "1").stderr == ""


def test_a_refusal_has_no_note_about_a_missing_script(daemon: FakeDaemon) -> None:
    daemon.refuses["submit"] = NeverFitsError("too large")
    assert call("submit", "--", "python", "nosuch.py").stderr == "carma: too large\n"


def test_an_empty_command_line_for_the_shell_is_refused(daemon: FakeDaemon) -> None:
    assert call("submit", "--wrap", " ").exit_code == 2
    assert daemon.asked("submit") == []


def test_everything_after_the_dashes_is_untouched(daemon: FakeDaemon) -> None:
    words = ("python", "-c", "print(';|&$HOME')", "--time", "--", "--help", "", " ", "{i}", "$(rm -rf /)")
    assert sent(daemon, "--", *words).spec.command == words


def test_directory_umask_and_environment_are_those_of_the_submitter(
    daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MARK", "here")
    before = os.umask(0o027)
    try:
        spec = sent(daemon, "--", "true").spec
        assert os.umask(0o027) == 0o027, "the caller's umask is left as it was"
    finally:
        os.umask(before)
    assert (spec.directory, spec.umask, spec.environment["MARK"]) == (str(tmp_path), 0o027, "here")


def test_the_slurm_spellings_work(daemon: FakeDaemon, tmp_path: Path) -> None:
    request = sent(
        daemon,
        *("-J", "my job", "-t", "1-02:00", "--gres=gpu:a100:2", "-o", "out-%j", "-e", "err-%j", "-D", str(tmp_path)),
        *("-d", "afterok:3:4,afterany:5", "-a", "0-3%2", "--nice", "5", "--no-requeue", "--signal=USR1@30", "-H"),
        *("--comment", "c", "--export=NONE,A=1", "--grace", "30", "--", "true"),
    )
    spec = request.spec
    assert (spec.name, spec.time_limit_s, spec.gpus, spec.directory) == ("my job", 26 * 3600.0, 2, str(tmp_path))
    assert spec.after == (Dependency(TaskId(3)), Dependency(TaskId(4)), Dependency(TaskId(5), "any"))
    assert request.array is not None
    assert (request.array.indices, request.array.at_once, request.held) == ((0, 1, 2, 3), 2, True)
    assert (spec.priority, spec.max_oom_retries, spec.grace_s) == (-5, 0, 30.0)
    assert spec.warn == WarnSignal(signal.SIGUSR1, 30.0)
    assert (spec.output, spec.error, spec.comment, spec.environment["A"]) == ("out-%j", "err-%j", "c", "1")
    assert "CARMA_HOME" not in spec.environment


def test_flags_without_a_meaning_here_are_noted_and_not_refused(daemon: FakeDaemon) -> None:
    result = call("submit", "--mem", "4G", "-c", "8", "--parsable", "--", "true")
    assert (result.exit_code, result.stdout) == (0, "1\n")
    assert "--gpu-mem" in result.stderr
    assert "--cpus-per-task" in result.stderr
    assert daemon.asked("submit")[0].spec.gpu_memory_mib is None, "host memory is not taken for GPU memory"


def test_a_script_is_read_and_the_command_line_beats_it(
    daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.sh").write_text("#!/bin/bash\n#CARMA --gpus 2 --gpu-mem 8G\n#SBATCH --time=5 --mem=4G\ntrue\n")
    spec = sent(daemon, "--gpus", "1", "train.sh", "--lr", "3").spec
    assert spec.command == ("/bin/bash", str(tmp_path / "train.sh"), "--lr", "3")
    assert (spec.gpus, spec.gpu_memory_mib, spec.time_limit_s, spec.name) == (1, 8192, 300.0, "train")


def test_only_a_script_with_sbatch_lines_gets_the_variables_of_slurm(daemon: FakeDaemon, tmp_path: Path) -> None:
    for text in ("#SBATCH -c 4\n", "#SBATCH -J x\n", "#CARMA -J x\n"):
        (tmp_path / "train.sh").write_text(f"#!/bin/sh\n{text}")
        assert call("submit", str(tmp_path / "train.sh")).exit_code == 0
    found = [request.spec.slurm for request in daemon.asked("submit")]
    assert found == [{"SLURM_CPUS_PER_TASK": "4"}, {}, None]


def test_unknown_sbatch_lines_are_skipped_aloud_unknown_carma_lines_are_not(daemon: FakeDaemon, tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text("#!/bin/sh\n#SBATCH --constraint=a100\n#SBATCH -J x\n")
    result = call("submit", str(path))
    assert result.exit_code == 0
    assert "--constraint" in result.stderr
    assert daemon.asked("submit")[0].spec.name == "x"
    path.write_text("#!/bin/sh\n\n#CARMA --gpu-memm 4G\n")
    result = call("submit", str(path))
    assert result.exit_code == 2
    assert "line 3" in result.stderr
    assert "--gpu-mem" in result.stderr


def test_a_task_file_and_a_rad_file(daemon: FakeDaemon, tmp_path: Path) -> None:
    toml = tmp_path / "task.toml"
    toml.write_text('command = "python train.py"\ngpus = 2\ntime = "2h"\n[environment]\nSEED = "1"\n')
    assert call("submit", "--file", str(toml), "--time", "1h").exit_code == 0
    rad = tmp_path / "old.rad"
    rad.write_text("#\n\npython old.py\ns\nd\n32\nexclusive\n3\n3934\n1\n2\n3\n")
    assert call("submit", str(rad)).exit_code == 0
    first, second = (request.spec for request in daemon.asked("submit"))
    assert (first.command, first.gpus, first.time_limit_s) == (("python", "train.py"), 2, 3600.0)
    assert first.environment["SEED"] == "1"
    assert (second.command, second.gpus, second.exclusive) == (("python", "old.py"), 3, True)
    assert (second.gpu_memory_mib, second.name) == (3934, "old")


def test_a_bad_file_is_refused_and_nothing_is_sent(daemon: FakeDaemon, tmp_path: Path) -> None:
    rad = tmp_path / "short.rad"
    rad.write_text("a\nb\n")
    for file in (rad, tmp_path, tmp_path / "absent.toml", tmp_path / "absent.rad", tmp_path / "absent.sh"):
        result = call("submit", "--file", str(file))
        assert result.exit_code == 2
        assert result.stderr.startswith("carma: ")
        assert "Traceback" not in result.stderr
    assert daemon.asked("submit") == []


def test_the_name_of_a_task_of_a_sweep_has_its_values(daemon: FakeDaemon, tmp_path: Path) -> None:
    script = tmp_path / "fit.sh"
    script.write_text("#!/bin/sh\n")
    params = ["--param", "lr=1e-3,a\tb", "--param", f"data={'x' * 300}"]
    assert call("submit", *params[:2], "--param", "seed=1,2", "--", "env", "LR={lr}", "x", "{seed}").exit_code == 0
    assert call("submit", *params, str(script), "{lr}", "{data}").exit_code == 0
    names = [request.spec.name for request in daemon.asked("submit")]
    assert names[:4] == ["lr=1e-3 seed=1", "lr=1e-3 seed=2", "lr=a?b seed=1", "lr=a?b seed=2"]
    assert names[4:] == [f"fit lr={lr} data={'x' * 300}"[:200] for lr in ("1e-3", "a?b")]


def test_sweeps_and_standard_input_make_one_task_each(daemon: FakeDaemon) -> None:
    result = call("submit", "--parsable", "--name", "lr-{lr}", "--param", "lr=1,2", "--", "train", "--lr={lr}")
    assert result.stdout.split() == ["1", "2"]
    assert [request.spec.name for request in daemon.asked("submit")] == ["lr-1", "lr-2"]
    result = call("submit", "--parsable", "--stdin", input="echo 'b c'\ntrue\n")
    assert result.stdout.split() == ["3", "4"]
    assert [request.spec.command for request in daemon.asked("submit")[2:]] == [("echo", "b c"), ("true",)]


def test_a_mistake_on_a_late_line_of_standard_input_submits_nothing(daemon: FakeDaemon) -> None:
    for wrong, said, code in (("no-such-program", "line 3", 1), ("echo 'open", "line 3", 2)):
        result = call("submit", "--stdin", input=f"true\n\n{wrong}\n")
        assert result.exit_code == code
        assert said in result.stderr
        assert "nothing was submitted" in result.stderr
    assert daemon.asked("submit") == []


def test_submitted_ids_have_one_format(daemon: FakeDaemon) -> None:
    assert call("submit", "--", "true").stdout == "submitted task 1\n"
    assert call("submit", "--array", "0-9", "--", "true").stdout == "submitted tasks 2-11 (10)\n"
    assert call("submit", "--stdin", input="true\n" * 3).stdout == "submitted tasks 12-14 (3)\n"
    assert call("submit", "--param", "a=1,2", "--", "true", "{a}").stdout == "submitted tasks 15-16 (2)\n"
    assert len(daemon.asked("submit")) == 7


def test_a_relative_begin_is_by_the_daemons_clock(daemon: FakeDaemon) -> None:
    assert sent(daemon, "--begin", "now+1hour", "--", "true").spec.begin_at == NOW + 3600


def test_a_task_table_in_a_file_is_as_good_as_none(daemon: FakeDaemon, tmp_path: Path) -> None:
    file = tmp_path / "task.toml"
    file.write_text('[task]\ncommand = ["true"]\ngpus = 2\n[environment]\nSEED = 1\n')
    spec = sent(daemon, "--file", str(file)).spec
    assert (spec.command, spec.gpus, spec.environment["SEED"]) == (("true",), 2, "1")
    file.write_text('gpus = 1\n[task]\ncommand = ["true"]\ngpus = 2\n')
    assert "'gpus' occurs at the top level and in [task]" in call("submit", "--file", str(file)).stderr


def test_the_error_for_a_missing_file_names_its_kind(daemon: FakeDaemon, tmp_path: Path) -> None:
    for path, said in ((str(tmp_path), "is a directory"), ("/dev/null", "is not a regular file"), ("/no", "no file")):
        result = call("submit", "--file", path)
        assert result.exit_code == 2
        assert said in result.stderr
    assert daemon.asked("submit") == []


def test_a_shell_is_used_only_when_asked_for(daemon: FakeDaemon) -> None:
    assert sent(daemon, "--wrap", "echo $A | cat").spec.command == ("/bin/sh", "-c", "echo $A | cat")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no command was given"),
        (["--"], "no command was given"),
        (["--gpus", "0", "--", "true"], "number of GPUs"),
        (["--gpu-mem", "lots", "--", "true"], "is not a size"),
        (["--time", "soon", "--", "true"], "is not a duration"),
        (["--tiem", "5", "--", "true"], "--time"),
        (["--signal", "USR1@9", "--", "true"], "--signal needs --time"),
        (["--stdin", "--", "true"], "exclude one another"),
        (["--array", "9-1", "--", "true"], "is not an array"),
        (["--array", "0-1000000000", "--", "true"], "more than 10,000 tasks"),
        (["--array", "1,1000000000", "--", "true"], "999,999,999"),
        (["--", ""], "is empty"),
        (["--name", "  ", "--", "true"], "is empty"),
        (["-o", "", "--", "true"], "is empty"),
    ],
)
def test_wrong_usage_has_exit_code_2_and_a_hint(daemon: FakeDaemon, words: list[str], said: str) -> None:
    result = call("submit", *words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "hint: " in result.stderr
    assert daemon.asked("submit") == []


def test_a_missing_working_directory_is_refused(daemon: FakeDaemon) -> None:
    result = call("submit", "--chdir", "/nowhere/at all", "--", "true")
    assert result.exit_code == 1
    assert "/nowhere/at all" in result.stderr
    assert daemon.asked("submit") == []


def test_a_refusal_of_the_daemon_is_passed_on(daemon: FakeDaemon) -> None:
    daemon.refuses["submit"] = NeverFitsError("needs 90 GiB; the largest GPU has 40 GiB", "ask for less")
    result = call("submit", "--parsable", "--", "true")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "carma: needs 90 GiB; the largest GPU has 40 GiB\n  hint: ask for less\n"
    daemon.refuses["submit"] = NoCapacity("nothing is free")
    assert call("submit", "--nonblock", "--", "true").exit_code == 75
    assert daemon.asked("submit")[-1].nonblock


def test_a_dry_run_prints_the_decision_and_submits_nothing(daemon: FakeDaemon) -> None:
    result = call("submit", "--dry-run", "--", "true")
    assert result.exit_code == 0
    assert "would start on GPU 2 now" in result.stdout
    assert daemon.asked("submit")[0].dry_run


def test_wait_returns_the_tasks_exit_code(daemon: FakeDaemon) -> None:
    daemon.tasks[1] = finished(1, code=7)
    assert call("submit", "--wait", "--", "true").exit_code == 7


@pytest.mark.parametrize(
    ("flags", "saves"),
    [
        ([], None),
        (["--checkpoint-signal", "USR1"], SaveSignal(10, 120.0)),
        (["--checkpoint-signal=SIGTERM", "--checkpoint-grace", "5m"], SaveSignal(15, 300.0)),
        (["--checkpoint-signal", "12", "--checkpoint-grace", "90"], SaveSignal(12, 90.0)),
    ],
)
def test_the_checkpoint_signal_and_its_grace_are_submitted(
    daemon: FakeDaemon, flags: list[str], saves: SaveSignal | None
) -> None:
    assert sent(daemon, *flags, "--", "true").spec.checkpoint == saves


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--checkpoint-grace", "60"], "--checkpoint-grace needs --checkpoint-signal"),
        (["--checkpoint-signal", "KILL"], "'KILL'"),
        (["--checkpoint-signal", "SAVE"], "'SAVE'"),
    ],
)
def test_a_signal_to_save_on_must_be_one(daemon: FakeDaemon, flags: list[str], complaint: str) -> None:
    result = call("submit", *flags, "--", "true")
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert not daemon.asked("submit")


def test_whom_to_notify_comes_from_the_options_or_from_the_users_file(daemon: FakeDaemon, tmp_path: Path) -> None:
    def notify(*words: str) -> Notify | None:
        assert call("submit", *words).exit_code == 0
        return daemon.asked("submit")[-1].spec.notify  # type: ignore[no-any-return]

    given = ("--notify", "mailto:a@b", "--notify", "say done, really")
    assert notify("--", "true") is None
    assert notify(*given, "--", "true") == Notify(targets=("mailto:a@b", "say done, really"), on=DEFAULT_NOTICES)
    assert notify(*given, "--notify-on", "oom,retry", "true") == Notify(targets=given[1::2], on=("oom", "retry"))
    task = tmp_path / "task.toml"
    task.write_text('command = ["true"]\nnotify = ["mailto:a@b", "say done, really"]\nnotify-on = "finish"')
    assert notify(str(task)) == Notify(targets=given[1::2], on=("finish",))
    (daemon.home / "notify.toml").write_text('targets = ["https://x/y"]\non = ["failure"]')
    assert notify("--", "true") == Notify(targets=("https://x/y",), on=("failure",))
    assert notify("--notify", "mailto:a@b", "--", "true") == Notify(targets=("mailto:a@b",), on=("failure",))
    assert notify("--notify", "none", "--", "true") is None


def test_mistakes_in_whom_to_notify_are_reported(daemon: FakeDaemon) -> None:
    assert call("submit", "--notify-on", "oom", "--", "true").exit_code == 2
    assert call("submit", "--notify-on", "nonsense", "--notify", "x", "--", "true").exit_code == 2
    (daemon.home / "notify.toml").write_text("tragets = []")
    assert "tragets" in call("submit", "--", "true").stderr
    assert not daemon.asked("submit")
