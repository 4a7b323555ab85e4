"""Problems 1 to 9 of the published system: a server that stops without a sign, and work that is lost or done twice.

Each test is named after its problem; its first line says what happened there, the rest what happens here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import LIMIT_S, Daemon, daemon_at_rest, request, serving, until

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 8.00 GiB"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """One for all that do not end it. Its GPUs are large and open, so that no test waits for another's task."""
    settings = {"warmup__enabled": False, "gate__enabled": False, "recovery__backoff_s": 0.01}
    with serving(gpus=2, memory_mib=40_960, monitor__period_s=0.1, **settings) as running:
        yield running


def carma(daemon: Daemon, *words: str, directory: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The real command line."""
    return subprocess.run(
        [sys.executable, "-m", "carma", *words],
        env=daemon.environ,
        cwd=directory or daemon.home,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def submit_in(daemon: Daemon, directory: Path, *command: str, **spec: object) -> int:
    return daemon.client.submit(request(*command, directory=str(directory), **spec)).ids[0]


def lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def _said(daemon: Daemon, task: int) -> bool:
    started = daemon.client.task(task).state == "running"
    return started and b"BLOOM" in b"".join(daemon.client.logs(task, stream="stderr"))


def test_problem_01_a_fresh_install_dispatches() -> None:
    """The default directory was the author's: listing it ended the scheduler, and the listener went on saying "queued".

    Here a home that does not exist yet and no settings at all are enough: the first task runs.
    """
    with daemon_at_rest() as somewhere:
        somewhere.environ = {
            **{name: value for name, value in somewhere.environ.items() if not name.startswith("CARMA_")},
            "CARMA_HOME": str(somewhere.home / "not" / "there"),
        }
        up = carma(somewhere, "up", "--virtual-gpus", "1", "--detach")
        assert up.returncode == 0, up.stderr
        submitted = carma(somewhere, "submit", "--parsable", "--", "sh", "-c", "echo it ran")
        assert submitted.stdout.strip().isdigit(), submitted.stderr
        assert carma(somewhere, "wait", submitted.stdout.strip()).returncode == 0
        assert carma(somewhere, "logs", submitted.stdout.strip()).stdout == "it ran\n"
        assert carma(somewhere, "down").returncode == 0


def test_problem_02_neither_a_bad_task_file_nor_a_silent_driver_stops_the_scheduler(daemon: Daemon) -> None:
    """Any exception (a short file, a word for a number, no nvidia-smi) ended scheduling for good, with no sign of it.

    Here a bad file is refused where it is submitted, a driver that does not answer is a reason to wait, and the next
    task runs. The 8 lines that the authors ship for GPT2-XL are enough.
    """
    good = ["# GPT2-XL", "", "true", "summary", "data", "8", "", "1"]
    bad = {"short": good[:5], "word": [*good[:7], "two"], "nan": [*good, "nan"]}
    for name, content in bad.items():
        file = daemon.home / f"{name}.rad"
        file.write_text("\n".join(content))
        refused = carma(daemon, "submit", str(file))
        assert (refused.returncode, str(file) in refused.stderr) == (2, True), refused.stderr
    assert carma(daemon, "submit", "missing.rad").returncode != 0

    devices, aside = daemon.paths.vgpu_dir / "devices", daemon.home / "aside"
    devices.rename(aside)
    until(lambda: {gpu.state for gpu in daemon.client.gpus()} == {"fault"}, "the GPUs do not answer")
    waits = daemon.submit("true")
    until(lambda: "cannot be used" in daemon.client.task(waits).reason, "the task waits, and says why")
    aside.rename(devices)
    assert daemon.wait(waits).exit_code == 0

    (daemon.home / "good.rad").write_text("\n".join(good))
    accepted = carma(daemon, "submit", "--parsable", "good.rad")
    assert daemon.wait(int(accepted.stdout)).exit_code == 0


def test_problem_03_a_task_is_relaunched_a_bounded_number_of_times(daemon: Daemon) -> None:
    """ "Recovered once" was remembered by a log's name, and each relaunch made a new one: relaunched first, for ever.

    Here attempts are counted with the task. A plain bug runs once; a task that runs out of memory each time ends with
    its story, and no other waits for it.
    """
    bug = daemon.submit("sh", "-c", "echo x >> bug; exit 3")
    hungry = daemon.submit("sh", "-c", f"echo x >> hungry; echo '{OOM}' >&2; exit 1", gpu_memory_mib=1000)
    other = daemon.submit("true")
    assert daemon.wait(other).exit_code == 0
    assert (daemon.wait(bug).outcome or {})["kind"] == "failed"
    view = daemon.wait(hungry)
    assert (view.outcome or {})["kind"] == "out_of_memory"
    assert len(lines(daemon.home / "bug")) == 1
    allowed = 1 + next(int(s.value) for s in daemon.client.settings() if s.name == "recovery.retries")
    assert 1 < len(view.attempts) <= allowed
    assert len(lines(daemon.home / "hungry")) == len(view.attempts)
    bookings = [attempt.booking_mib for attempt in view.attempts]
    assert bookings == sorted(bookings)
    outcome = view.outcome or {}
    assert outcome["message"].startswith("torch.OutOfMemoryError")
    assert "alone" in outcome["no_retry"] or "retries" in outcome["no_retry"]


def test_problem_04_only_an_oom_counts_as_an_oom(daemon: Daemon) -> None:
    """Every exit other than 0 counted as an OOM: a typing mistake, the user's own kill, a data set that is missing.

    Here each is a failure with its code and its message, and none is tried again.
    """
    typo = daemon.submit(sys.executable, "-c", "import no_such_module_anywhere")
    missing = daemon.submit(sys.executable, "-c", "open('/no/such/dataset')")
    killed = daemon.submit("sh", "-c", "kill -KILL $$")
    seen = {name: daemon.wait(task) for name, task in (("typo", typo), ("missing", missing), ("killed", killed))}
    outcomes = {name: view.outcome or {} for name, view in seen.items()}
    assert {name: (o["kind"], o["code"]) for name, o in outcomes.items()} == {
        "typo": ("failed", 1),
        "missing": ("failed", 1),
        "killed": ("failed", 128 + signal.SIGKILL),
    }
    assert "ModuleNotFoundError" in outcomes["typo"]["message"]
    assert "FileNotFoundError" in outcomes["missing"]["message"]
    assert {len(view.attempts) for view in seen.values()} == {1}


def test_problem_05_a_log_line_with_bloom_does_not_duplicate_a_running_job(daemon: Daemon) -> None:
    """A line with OOM in it (also BLOOM, ZOOM, a path, a warning) started the job again while it still ran.

    Here only how a program ended decides, and only after it has ended.
    """
    said = "loading BLOOM-7b1 from /data/OOM/ZOOM; warning: CUDA out of memory was caught, RESOURCE_EXHAUSTED"
    go = daemon.home / "bloom-go"
    wait_then_end = "while ! [ -e bloom-go ]; do sleep 0.02; done; exit"
    body = f"echo x >> bloom; echo '{said}' >&2; echo '{said}'; {wait_then_end}"
    succeeds, fails = daemon.submit("sh", "-c", f"{body} 0"), daemon.submit("sh", "-c", f"{body} 1")
    until(lambda: _said(daemon, succeeds) and _said(daemon, fails), "both have said it")
    assert daemon.wait(daemon.submit("true")).exit_code == 0  # the scheduler has been around since
    assert [daemon.client.task(task).state for task in (succeeds, fails)] == ["running", "running"]
    go.touch()
    ended = [daemon.wait(succeeds), daemon.wait(fails)]
    assert [(view.outcome or {})["kind"] for view in ended] == ["succeeded", "failed"]
    assert [len(view.attempts) for view in ended] == [1, 1]
    assert len(lines(daemon.home / "bloom")) == 2


def test_problem_06_a_restart_forgets_nothing_and_repeats_nothing() -> None:
    """A restart queued every old failure again, lost what was queued and forgot what ran.

    Here, killed and started again: what failed stays failed, what runs is the same process, what waits still does.
    """
    with serving(gpus=1, placement__policy="exclusive") as daemon:
        failed = daemon.submit("sh", "-c", f"echo x >> failed; echo '{OOM}' >&2; exit 1", max_oom_retries=0)
        assert (daemon.wait(failed).outcome or {})["kind"] == "out_of_memory"
        runs = daemon.submit("sh", "-c", "echo x >> running; while ! [ -e go ]; do sleep 0.02; done; exit 5")
        pid = daemon.until_state(runs, "running").attempts[0].pid
        queued = [daemon.submit("sh", "-c", "echo x >> queued") for _ in range(3)]
        daemon.kill()
        daemon.start()
        assert {view.id for view in daemon.client.tasks()} == {runs, *queued}
        assert daemon.until_state(runs, "running").attempts[0].pid == pid
        (daemon.home / "go").touch()
        assert daemon.wait(runs).exit_code == 5
        assert [daemon.wait(task).exit_code for task in queued] == [0, 0, 0]
        assert len(daemon.client.task(failed).attempts) == 1
        counts = {name: len(lines(daemon.home / name)) for name in ("failed", "running", "queued")}
        assert counts == {"failed": 1, "running": 1, "queued": 3}


def test_problem_07_a_crash_is_noticed_whatever_the_working_directory(daemon: Daemon) -> None:
    """Crashes were noticed only when the client's working directory was the one that the server was set up to read.

    Here each attempt answers for itself, wherever it was submitted from; also where the path has spaces and plus signs.
    """
    places = [daemon.home / "one", daemon.home / "two + three" / "ü $(x)"]
    script = f"echo \"$CARMA_ATTEMPT\" >> here; echo '{OOM}' >&2; exit 1"
    tasks = []
    for place in places:
        place.mkdir(parents=True)
        words = ("submit", "--parsable", "--max-oom-retries", "1", "--gpu-mem", "1GiB", "--", "sh", "-c", script)
        submitted = carma(daemon, *words, directory=place)
        assert submitted.returncode == 0, submitted.stderr
        tasks.append(int(submitted.stdout))
    for place, task in zip(places, tasks, strict=True):
        view = daemon.wait(task)
        assert view.directory == str(place)
        assert (view.outcome or {})["kind"] == "out_of_memory"
        assert lines(place / "here") == ["1", "2"]


def test_problem_08_only_the_task_writes_to_its_log() -> None:
    """A header, written by a thread that raced with the job, cut off the log; a log that was missing ended scheduling.

    Here logs are appended to, by the job alone: every byte is there after a restart, also what the file held before,
    and a job that removes its own log ends as it ended.
    """
    with serving(gpus=2, memory_mib=40_960, warmup__enabled=False, gate__enabled=False) as daemon:
        kept = daemon.home / "kept.log"
        kept.write_bytes(b"before\n")
        body = "echo first; echo first-error >&2; while ! [ -e go ]; do sleep 0.02; done; echo last; exit 4"
        own = daemon.submit("sh", "-c", body)
        named = daemon.submit("sh", "-c", body, output="kept.log")
        gone = daemon.submit("sh", "-c", "rm gone.log; exit 6", output="gone.log")
        assert daemon.wait(gone).exit_code == 6
        daemon.until_state(own, "running")
        until(lambda: b"first" in b"".join(daemon.client.logs(own)), "the first has begun to write")
        until(lambda: b"first-error" in kept.read_bytes(), "the second has begun to write")
        daemon.kill()
        daemon.start()
        (daemon.home / "go").touch()
        assert [daemon.wait(task).exit_code for task in (own, named)] == [4, 4]
        assert b"".join(daemon.client.logs(own)) == b"first\nlast\n"
        assert b"".join(daemon.client.logs(own, stream="stderr")) == b"first-error\n"
        assert kept.read_bytes() == b"before\nfirst\nfirst-error\nlast\n"


def test_problem_09_a_banner_is_not_a_pid_and_a_silent_launch_delays_no_other() -> None:
    """A login banner on standard output was taken for the pid, and the GPU for free; a silent launch froze scheduling.

    Here the pid is the process's, whatever is printed; its GPU is held; others start beside a job that says nothing.
    """
    with serving(gpus=2, placement__policy="exclusive") as daemon:
        silent = daemon.submit("sh", "-c", "while ! [ -e go ]; do sleep 0.02; done")
        banner = "echo '12345'; echo 'Welcome! Last login: pid 999'; echo $$ > pid; "
        noisy = daemon.submit("sh", "-c", f"{banner} while ! [ -e go ]; do sleep 0.02; done")
        views = [daemon.until_state(task, "running") for task in (silent, noisy)]
        until(lambda: (daemon.home / "pid").exists() and bool(lines(daemon.home / "pid")), "the job wrote its pid")
        assert views[1].attempts[0].pid == int(lines(daemon.home / "pid")[0])
        assert views[0].attempts[0].pid is not None
        os.kill(views[0].attempts[0].pid, 0)
        held = {gpu.index: gpu.tasks for gpu in daemon.client.gpus()}
        assert sorted(held.values()) == [(silent,), (noisy,)]
        third = daemon.submit("true")
        until(lambda: "is on it" in daemon.client.task(third).reason, "the third waits for a GPU of its own")
        (daemon.home / "go").touch()
        assert [daemon.wait(task).exit_code for task in (silent, noisy, third)] == [0, 0, 0]
