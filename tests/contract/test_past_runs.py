"""Past runs by their command without its numbers: the same from every store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from carma.core.model.values import AttemptKey, TaskId
from carma.core.ports import PastRun
from carma.store.memory import MemoryStore
from carma.store.sqlite import SqliteStore

AnyStore = SqliteStore | MemoryStore


@pytest.fixture(params=["sqlite", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AnyStore]:
    made: AnyStore = SqliteStore(tmp_path / "carma.db") if request.param == "sqlite" else MemoryStore()
    yield made
    made.close()


def ran(task: int, *words: str, uid: int = 1001, directory: str = "/home/alice") -> PastRun:
    return PastRun(
        key=AttemptKey(TaskId(task), 1),
        uid=uid,
        command=("python", "train.py", *words),
        directory=directory,
        gpus=1,
        gpu_model="A100",
        peak_mib=4_000,
        runtime_s=90.0,
        succeeded=True,
        collocated=False,
        ended_at=float(task),
        fingerprint="abc",
        more_than_mib=5_000,
    )


def test_near_runs_differ_in_numbers_only(store: AnyStore) -> None:
    near = [ran(1, "--batch", "32"), ran(2, "--batch", "64"), ran(3, "--batch", "64")]
    others = [
        ran(4, "--batch", "large"),
        ran(5, "--batch", "64", "--amp"),
        ran(6, "--batch=64"),
        ran(7, "--batch", "64", uid=1002),
        ran(8, "--batch", "64", directory="/home/alice/other"),
    ]
    for run in (*near, *others):
        store.remember(run)
    command = ("python", "train.py", "--batch", "128")
    found = store.past_runs(uid=1001, command=command, directory="/home/alice", near=True)
    assert list(found) == near[::-1]
    newest = store.past_runs(uid=1001, command=command, directory="/home/alice", limit=1, near=True)
    assert list(newest) == near[-1:]


def test_a_word_that_looks_like_a_blank_is_found_with_numbers_and_told_apart_by_who_asks(store: AnyStore) -> None:
    store.remember(ran(1, "--batch", "#"))
    command = ("python", "train.py", "--batch", "64")
    assert len(store.past_runs(uid=1001, command=command, directory="/home/alice", near=True)) == 1
    assert list(store.past_runs(uid=1001, command=command, directory="/home/alice")) == []
