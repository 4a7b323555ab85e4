"""The users, created once for each worker, and the daemon that most tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness import Daemon
from tests.multiuser.people import Person, two_people
from tests.multiuser.serving import end_all_tasks, root_daemon


@pytest.fixture(scope="session")
def people() -> Iterator[tuple[Person, Person]]:
    with two_people() as found:
        yield found


@pytest.fixture(scope="session")
def alice(people: tuple[Person, Person]) -> Person:
    """The attacker."""
    return people[0]


@pytest.fixture(scope="session")
def bob(people: tuple[Person, Person]) -> Person:
    """The user who is attacked."""
    return people[1]


@pytest.fixture(scope="session")
def shared_daemon(people: tuple[Person, Person]) -> Iterator[Daemon]:
    del people  # no daemon is started where there are no users
    with root_daemon(own_program=True) as daemon:
        yield daemon


@pytest.fixture
def daemon(shared_daemon: Daemon) -> Iterator[Daemon]:
    yield shared_daemon
    end_all_tasks(shared_daemon)
