"""A trial run of one user's command, which root starts before the task is placed: the user's rights and no more."""

from __future__ import annotations

import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from carma.core.model.values import Owner, TaskId, TaskSpec
from carma.core.ports import EstimateRequest
from carma.trial.trial_cache import TrialCache
from carma.trial.trial_run import TrialRuns
from tests.boxes import SandboxVariant, variant_or_skip
from tests.harness import Daemon
from tests.multiuser.keys import keyring_calls, with_a_session_key
from tests.multiuser.people import PATH, ROOT, Person
from tests.multiuser.serving import attempt_folder, ended, pid_of, shell
from tests.trials import ScriptedTrials


def owner(person: Person) -> Owner:
    return Owner(person.uid, person.gid, person.name)


@pytest.fixture
def place(alice: Person) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="carma-trial-", dir="/tmp"))
    folder.chmod(0o755)
    (folder / "work").mkdir()
    alice.own(folder / "work")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def trial(alice: Person) -> SandboxVariant:
    """A trial run that root makes for Alice."""
    variant = variant_or_skip("root-for-another")
    variant.owner = owner(alice)
    return variant


def said(variant: SandboxVariant, script: str, place: Path, keep: Path | None = None) -> str:
    """What a command in the sandbox prints."""
    status = variant.run(script, place, keep=keep).status
    assert status.ended == "exit", status
    return status.stdout + status.stderr


def test_a_trial_run_has_exactly_its_owners_user_and_groups(trial: SandboxVariant, place: Path, alice: Person) -> None:
    lines = said(trial, "grep -E '^(Uid|Gid|Groups|CapPrm|CapEff|CapAmb|NoNewPrivs):' /proc/self/status", place)
    found = {line.split(":")[0]: line.split()[1:] for line in lines.splitlines()}
    assert found["Uid"] == [str(alice.uid)] * 4
    assert found["Gid"] == [str(alice.gid)] * 4
    assert [int(group) for group in found["Groups"]] == alice.groups
    assert {int(found[name][0], 16) for name in ("CapPrm", "CapEff", "CapAmb")} == {0}
    assert found["NoNewPrivs"] == ["1"]


def test_a_trial_run_reads_no_file_of_another_user(
    daemon: Daemon, trial: SandboxVariant, place: Path, bob: Person
) -> None:
    mark = f"mark{secrets.token_hex(8)}"
    task = shell(bob, daemon, f"echo {mark}")
    ended(daemon, task)
    private = bob.file(f"private-{mark}", f"{mark}\n")
    roots = daemon.home / f"root-{mark}"
    roots.write_text(f"{mark}\n")
    roots.chmod(0o600)
    files = [private, roots, attempt_folder(daemon, task) / "stdout.log", daemon.paths.database]
    told = said(trial, "; ".join(f"cat {file} || echo refused" for file in files), place)
    assert told.count("refused") == len(files)
    assert f"{mark}\n" not in told


def test_a_trial_run_changes_no_file_of_another_user(trial: SandboxVariant, place: Path, bob: Person) -> None:
    """A trial run writes to a copy even of a file that every user may write."""
    closed = bob.file(f"closed-{secrets.token_hex(4)}", "bob's")
    public = bob.file(f"public-{secrets.token_hex(4)}", "bob's", 0o666)
    said(trial, f"echo changed > {closed}; echo changed > {public}; rm -f {closed} {public}", place)
    assert (closed.read_text(), public.read_text()) == ("bob's", "bob's")


def test_a_trial_run_sees_and_signals_no_process_outside(
    daemon: Daemon, trial: SandboxVariant, place: Path, alice: Person, bob: Person
) -> None:
    own, other = (pid_of(daemon, shell(person, daemon, "sleep 600")) for person in (alice, bob))
    told = said(trial, f"ls /proc; kill -9 {own} {other} -1; echo over", place)
    listed = {int(word) for word in told.split() if word.isdigit()}
    assert max(listed, default=0) < 1000 or not {own, other} & listed
    assert all(Path(f"/proc/{pid}").exists() for pid in (own, other))


def test_a_trial_run_cannot_ask_the_daemon(daemon: Daemon, trial: SandboxVariant, place: Path) -> None:
    """It could submit tasks without an end while it is only tried out."""
    script = f"""perl -MSocket -e 'socket(S, PF_UNIX, SOCK_STREAM, 0);
        print(connect(S, sockaddr_un("{daemon.paths.socket}")) ? "connected" : "refused: $!")'"""
    if shutil.which("perl", path=PATH) is None:
        pytest.skip("perl, which makes the connection in the sandbox, is not installed")
    assert "refused" in said(trial, script, place)


def test_a_trial_run_does_not_reach_an_abstract_socket(trial: SandboxVariant, place: Path) -> None:
    if shutil.which("perl", path=PATH) is None:
        pytest.skip("perl, which makes the connection in the sandbox, is not installed")
    name = f"carma-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        script = f"""perl -MSocket -e 'socket(S, PF_UNIX, SOCK_STREAM, 0); my $to = pack("S a*", AF_UNIX, "\\0{name}");
            print(connect(S, $to) ? "connected" : "refused: $!")'"""
        assert "refused" in said(trial, script, place)


def test_a_trial_run_does_not_get_the_keys_of_the_daemons_session(trial: SandboxVariant, place: Path) -> None:
    mark = f"mark{secrets.token_hex(8)}"
    calls = keyring_calls()

    def run() -> str:
        with_a_session_key(mark, *calls)
        return said(trial, "cat /proc/keys", place)

    assert mark not in ROOT.act(run)


def test_what_one_user_compiled_is_never_loaded_for_another(
    trial: SandboxVariant, place: Path, alice: Person, bob: Person
) -> None:
    """The directory of compiled parts outlives a trial run, and its files are loaded into the next one."""
    del trial  # skips where there is no sandbox
    cache = place / "cache"
    runs = TrialRuns(cache, limit_s=60.0)

    def run(person: Person, script: str) -> None:
        """Runs a trial whose directory of compiled parts is CARMA_TRACE_BUILD."""
        folder = place / f"work-{person.name}"
        if not folder.exists():
            folder.mkdir()
            person.own(folder)
        spec = TaskSpec(command=("/bin/sh", "-c", script), directory=str(folder), environment={"PATH": PATH})
        runs.run(EstimateRequest(task=TaskId(1), owner=owner(person), spec=spec, gpus=()))

    run(alice, "echo poison > $CARMA_TRACE_BUILD/part.so")
    kept = list((cache / "builds").rglob("part.so"))
    assert [file.stat().st_uid for file in kept] == [alice.uid]
    run(bob, f"cp -r $CARMA_TRACE_BUILD {place}/seen; touch $CARMA_TRACE_BUILD/bobs; chmod 777 $CARMA_TRACE_BUILD")
    (own,) = (cache / "builds").rglob("bobs")
    assert own.stat().st_uid == bob.uid
    assert sorted(file.name for file in own.parent.iterdir()) == ["bobs"]
    places = [folder for folder in (cache / "builds").iterdir() if folder.is_dir()]
    for folder in places:
        with pytest.raises(PermissionError):
            (alice if folder == own.parent else bob).act(lambda folder=folder: (folder / "part.so").write_text("evil"))  # type: ignore[misc]


def test_trial_runs_that_are_remembered_are_closed_to_users(place: Path, alice: Person) -> None:
    """A user who can write there could choose the booking of another user's task."""
    cache = TrialCache(place / "cache" / "trials")
    cache.put("key", ScriptedTrials(("true",)).trial)
    for folder in (place / "cache", place / "cache" / "trials"):
        assert folder.is_dir()
        with pytest.raises(PermissionError):
            alice.act(lambda folder=folder: (folder / "key.trial").write_bytes(b"poison"))  # type: ignore[misc]
