"""The daemon's own files: what it says when they cannot be made, and what it does when they are taken away."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from carma.core.model.events import GpusFound, TaskEstimated, TaskPlaced, TaskSubmitted
from carma.core.model.settings import Rules
from carma.core.model.values import AttemptKey, Booking, Owner, Placement, TaskId, TaskSpec
from carma.core.policies import magm
from carma.core.state import State
from carma.daemon.startup import home_directory as home
from carma.errors import CarmaError, StoreError
from carma.paths import Paths, find_paths
from carma.store.memory import MemoryStore
from carma.testing.builders import gpu
from carma.testing.fake_launcher import FakeLauncher, Plan
from tests.unit.daemon.shells import make_executor, make_shell, writing


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    made = find_paths({"CARMA_HOME": str(tmp_path)})
    made.log_dir.mkdir()
    return made


@pytest.mark.parametrize(
    ("number", "hint"), [(errno.ENOSPC, "Free some space"), (errno.EDQUOT, "Free some space"), (errno.EACCES, "owner")]
)
def test_an_error_of_the_system_at_the_start_names_the_file_the_reason_and_what_to_do(
    paths: Paths, number: int, hint: str
) -> None:
    def start() -> None:
        with home.os_errors_explained(paths):
            raise OSError(number, "Some reason", str(paths.pid_file))

    with pytest.raises(StoreError) as caught:
        start()
    assert str(caught.value) == f"the daemon could not start: {paths.pid_file}: some reason"
    assert hint in caught.value.hint


def test_a_pid_file_that_cannot_be_written_is_such_an_error(paths: Paths) -> None:
    paths.pid_file.mkdir()

    def start() -> None:
        with home.os_errors_explained(paths), home.pid_file(paths.pid_file):
            pass

    with pytest.raises(StoreError, match=r"daemon\.pid: is a directory"):
        start()


def test_directories_of_attempts_without_a_database_are_refused(paths: Paths) -> None:
    home.refuse_lost_database(paths)
    (paths.log_dir / "daemon.log").touch()
    (paths.log_dir / "notes").mkdir()
    home.refuse_lost_database(paths)
    (paths.log_dir / "17.2").mkdir()
    with pytest.raises(StoreError, match=r"17\.2") as caught:
        home.refuse_lost_database(paths)
    assert "--new-database" in caught.value.hint
    paths.database.touch()  # what is in it is the store's question
    home.refuse_lost_database(paths)


def test_the_daemon_gives_up_when_two_looks_in_a_row_do_not_find_the_database(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(home, "CHECK_S", 0.0)
    looks = iter([True, False, True, True, False, False])
    given_up: list[CarmaError] = []

    async def in_place() -> bool:
        return next(looks)

    asyncio.run(home.watch_database(in_place, given_up.append, paths.database))
    assert list(looks) == []
    assert [error.code for error in given_up] == ["store"]
    assert str(paths.database) in str(given_up[0])


class Elsewhere(MemoryStore):
    """A store whose files can be taken away."""

    here = True

    def in_place(self) -> bool:
        return self.here


@pytest.mark.parametrize("here", [True, False])
def test_nothing_is_launched_after_the_database_was_removed(here: bool) -> None:
    store = Elsewhere()
    launcher = FakeLauncher(lambda _key: Plan())
    key = AttemptKey(TaskId(1), 1)

    async def work() -> None:
        shell = make_shell(store, State(Rules(), magm.POLICY))
        executor = make_executor(shell, launcher)
        spec = TaskSpec(command=("x",), directory="/")
        placement = Placement(gpus=(gpu(0).id,), booking=Booking(memory_mib=1, source="declared"))
        async with writing(shell, executor.follow):
            await shell.commit([GpusFound(1.0, (gpu(0),)), TaskSubmitted(1.0, key.task, Owner(1, 1, "ada"), spec)])
            await shell.commit([TaskEstimated(1.0, key.task, None)])
            store.here = here  # after the commit has checked it
            await shell.commit([TaskPlaced(1.0, key, placement)])
            await executor.call_launcher(lambda: None)  # after the launch
            await executor.close()

    asyncio.run(work())
    assert [order.key for order in launcher.launched] == ([key] if here else [])
