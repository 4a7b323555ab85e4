"""Output as it was written: whole, the last lines, as it grows, through retries; and no file that is not ours."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carma import errors
from carma.core.events import RecoveryDue, RecoveryPlanned
from carma.core.model import AttemptKey, TaskId
from carma.core.outcome import OutOfMemory
from carma.core.task import Plan
from carma.daemon.logs import open_log, tail_offset
from tests.unit.api_server import LIMIT_S, Served, serving, until


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as made:
        yield made


def started(served: Served) -> AttemptKey:
    task = served.client().submit(served.request()).ids[0]
    served.estimated(task)
    key = served.place(task)
    served.log_paths(key)[0].parent.mkdir()
    return key


def write(served: Served, key: AttemptKey, data: bytes, stream: int = 0) -> None:
    with served.log_paths(key)[stream].open("ab") as file:
        file.write(data)


def read(served: Served, key: AttemptKey, **options: object) -> bytes:
    return b"".join(served.client().logs(key.task, **options))  # type: ignore[arg-type]


def test_output_comes_byte_for_byte(served: Served) -> None:
    key = started(served)
    assert read(served, key) == b""  # nothing was written yet
    data = bytes(range(256)) * 2_000 + b"\xff no end of line"
    write(served, key, data)
    write(served, key, b"trouble\n", stream=1)
    assert read(served, key) == data
    assert read(served, key, stream="stderr") == b"trouble\n"
    assert read(served, key, attempt=1) == data
    with pytest.raises(errors.NotFound, match="no attempt 2"):
        read(served, key, attempt=2)
    with pytest.raises(errors.Usage, match="no stream 'stdlog'"):
        read(served, key, stream="stdlog")


def test_a_task_that_never_ran_has_no_output(served: Served) -> None:
    task = served.client().submit(served.request()).ids[0]
    assert list(served.client().logs(task)) == []


def test_the_last_lines(served: Served) -> None:
    key = started(served)
    write(served, key, b"one\ntwo\nthree\n")
    assert read(served, key, tail=2) == b"two\nthree\n"
    assert read(served, key, tail=0) == b""
    assert read(served, key, tail=99) == b"one\ntwo\nthree\n"


@settings(deadline=None)
@given(text=st.text(alphabet="a\n", max_size=40), lines=st.integers(0, 50), repeated=st.sampled_from([1, 4_000]))
def test_the_last_lines_are_what_tail_would_print(text: str, lines: int, repeated: int) -> None:
    data = (text * repeated).encode()
    file = os.memfd_create("log")
    try:
        os.write(file, data)
        offset = tail_offset(file, lines)
    finally:
        os.close(file)
    kept = data.splitlines(keepends=True)
    assert data[offset:] == b"".join(kept[max(0, len(kept) - lines) :])


def test_following_ends_with_the_task_and_misses_nothing(served: Served) -> None:
    key = started(served)
    write(served, key, b"first\n")
    follower = served.client().logs(key.task, follow=True)
    assert next(follower) == b"first\n"
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(lambda: b"".join(follower))
        write(served, key, b"second\n")
        until(lambda: served.shell.waiting == 1)
        write(served, key, b"last words")
        served.end(key)
        assert rest.result(LIMIT_S) == b"second\nlast words"


def test_following_goes_on_with_the_next_attempt(served: Served) -> None:
    first = started(served)
    write(served, first, b"one\n")
    with ThreadPoolExecutor(1) as pool:
        client = served.client()
        output = pool.submit(lambda: b"".join(client.logs(first.task, follow=True)))
        until(lambda: served.shell.waiting == 1)
        now = served.shell.clock.now()
        plan = Plan(rung="larger", memory_mib=8_000, reason="more memory")
        served.end(first, OutOfMemory("gpu", 1, 100, 3_000))
        served.emit(RecoveryPlanned(now, first.task, plan, now), RecoveryDue(now, first.task))
        second = served.place(first.task, 1)
        assert second.attempt == 2
        served.log_paths(second)[0].parent.mkdir()
        write(served, second, b"two\n")
        served.end(second)
        served.archive()
        assert output.result(LIMIT_S) == b"one\ntwo\n"
    assert read(served, first) == b"two\n"  # the newest, of a task that has left memory
    assert read(served, first, attempt=1) == b"one\n"


def test_following_a_task_that_waits_begins_when_it_starts(served: Served) -> None:
    client = served.client()
    task = client.submit(served.request()).ids[0]
    served.estimated(task)
    with ThreadPoolExecutor(1) as pool:
        output = pool.submit(lambda: b"".join(client.logs(task, follow=True)))
        until(lambda: served.shell.waiting == 1)
        directory = served.log_paths(AttemptKey(TaskId(task), 1))[0].parent
        directory.mkdir()
        (directory / "stdout.log").write_bytes(b"hello\n")
        served.end(served.place(task))
        assert output.result(LIMIT_S) == b"hello\n"


def test_a_follower_that_leaves_is_forgotten(served: Served) -> None:
    key = started(served)
    write(served, key, b"first\n")
    before = served.server.open_connections
    follower = served.client().logs(key.task, follow=True)
    assert next(follower) == b"first\n"
    follower.close()  # type: ignore[attr-defined]
    until(lambda: served.server.open_connections == before and served.shell.waiting == 0)


def test_only_plain_files_of_our_own_directory_are_opened(tmp_path: Path) -> None:
    ours, elsewhere = tmp_path / "logs", tmp_path / "home"
    (ours / "1.1").mkdir(parents=True)
    elsewhere.mkdir()
    secret = elsewhere / "secret"
    secret.write_text("secret")
    (ours / "1.1" / "link").symlink_to(secret)
    (ours / "linked").symlink_to(elsewhere)
    os.link(secret, ours / "1.1" / "hard")
    os.mkfifo(ours / "1.1" / "pipe")
    for path in (
        secret,
        ours / "1.1" / "link",
        ours / "linked" / "secret",
        ours / "1.1" / "hard",
        ours / "1.1" / "pipe",
        ours / "1.1",
        ours / ".." / "home" / "secret",
    ):
        with pytest.raises(errors.NotFound, match="not in the daemon's own directory") as caught:
            open_log(path, ours)
        assert str(path) in caught.value.hint
    assert open_log(ours / "1.1" / "stdout.log", ours) is None


def test_output_that_was_sent_elsewhere_is_named(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = started(served)
    mine = tmp_path / "mine.log"
    mine.write_text("hers alone")
    monkeypatch.setattr(served, "log_paths", lambda _key: (mine, mine))
    with pytest.raises(errors.NotFound) as caught:
        read(served, key)
    assert str(mine) in caught.value.hint
