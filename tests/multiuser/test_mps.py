"""MPS servers: one for each user, started by root under the user's account, in a directory of the user's.

A stand-in plays NVIDIA's control program; it is started as root starts the real one.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from carma.core.model.values import Owner
from carma.launch import mps_control
from carma.launch.mps import MpsServers
from carma.launch.mps_control import CONTROL, MpsFailed
from tests.mps_program import Program, short_home
from tests.multiuser.keys import keyring_calls, with_a_session_key
from tests.multiuser.people import PATH, ROOT, Person


@pytest.fixture
def home(alice: Person) -> Iterator[Path]:
    del alice  # skips without users
    with short_home() as folder:
        yield folder


@pytest.fixture
def program(home: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    made = Program(home / "bin")
    (home / "bin").chmod(0o777)  # it notes how often it was started
    made.install(monkeypatch)
    return made


@pytest.fixture
def servers(home: Path, program: Program) -> Iterator[MpsServers]:
    del program
    made = MpsServers(home / "mps", open_to_users=True)
    yield made
    made.close(())


def owner(person: Person) -> Owner:
    return Owner(person.uid, person.gid, person.name)


def test_the_server_of_a_user_runs_as_that_user_in_a_directory_that_is_closed_to_others(
    servers: MpsServers, alice: Person, bob: Person
) -> None:
    serving = servers.serve(owner(bob))
    directory = Path(serving.control.directory)
    assert all(mps_control.real_uid(one.pid) == bob.uid for one in serving.processes)
    for attack in (directory.iterdir, (directory / "control").open, (directory / "log" / "control.log").read_bytes):
        with pytest.raises(PermissionError):
            alice.act(lambda attack=attack: list(attack()))  # type: ignore[misc]
    with pytest.raises(PermissionError):
        alice.act((directory / "mine").touch)
    assert servers.serve(owner(alice)).control.directory != serving.control.directory


def test_the_records_of_the_servers_cannot_be_changed_by_users(home: Path, servers: MpsServers, alice: Person) -> None:
    """They name the processes that CARMA signals."""
    servers.serve(owner(alice))
    records = list((home / "mps").glob("*.json"))
    assert records
    for record in records:
        for attack in (record.read_bytes, record.unlink, lambda record=record: record.write_text("{}")):
            with pytest.raises(PermissionError):
                alice.act(attack)


def test_a_pid_that_a_user_writes_down_does_not_make_another_users_process_a_server(
    servers: MpsServers, alice: Person, bob: Person
) -> None:
    """A process that counts as her server would be signalled in her name."""
    serving = servers.serve(owner(alice))
    victim = servers.serve(owner(bob)).daemon.pid
    pid_file = Path(serving.control.directory) / f"{CONTROL}.pid"
    alice.act(lambda: pid_file.write_text(f"{victim}\n"))
    assert serving.control.find() is None


def test_a_users_link_does_not_bring_a_line_of_another_users_file_into_a_message(
    home: Path, servers: MpsServers, alice: Person, bob: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When MPS does not start, the message quotes the last line of its log, which lies in a directory of the user's."""
    mark = f"mark{secrets.token_hex(8)}"
    private = bob.folder(f"private-{mark}")
    (private / "control.log").write_text(f"{mark}\n")
    monkeypatch.setattr(mps_control, "START_LIMIT_S", 1.0)
    script = f'#!/bin/sh\nrm -rf "$CUDA_MPS_LOG_DIRECTORY"\nln -s {private} "$CUDA_MPS_LOG_DIRECTORY"\n'
    (home / "bin" / CONTROL).write_text(script)
    with pytest.raises(MpsFailed) as met:
        servers.serve(owner(alice))
    assert mark not in str(met.value)


def test_the_server_of_a_user_does_not_get_the_keys_of_the_daemons_session(
    home: Path, servers: MpsServers, alice: Person
) -> None:
    """It runs under her account, so she can read what it can read."""
    mark = f"mark{secrets.token_hex(8)}"
    calls = keyring_calls()
    seen = alice.home / f"keys-{mark}"
    (home / "bin" / CONTROL).write_text(f"#!/bin/sh\ncat /proc/keys > {seen}\nexit 1\n")

    def serve() -> None:
        os.environ["PATH"] = f"{home}/bin:{PATH}"
        with_a_session_key(mark, *calls)
        with pytest.raises(MpsFailed):
            servers.serve(owner(alice))

    ROOT.act(serve)
    assert seen.exists()
    assert mark not in seen.read_text()
