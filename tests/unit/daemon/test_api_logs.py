"""Output as it was written: whole, the last lines, as it grows, through retries; and no file that is not ours."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carma import errors
from carma.core.model.events import RecoveryDue, RecoveryPlanned
from carma.core.model.outcome import OutOfMemory
from carma.core.model.task import Plan
from carma.core.model.values import AttemptKey, TaskId
from carma.daemon.api.streams import tail_offset
from carma.launch import output_files
from carma.launch.attempt_files import AttemptFiles
from carma.launch.output_files import OutputLimit
from tests.unit.daemon.api_server import LIMIT_S, Served, serving, until


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


def test_following_a_waiting_task_with_a_named_output_is_refused_at_once(served: Served) -> None:
    """A refusal at the start of the first attempt would break a stream whose headers were sent."""
    client = served.client()
    task = client.submit(served.request(output="out-%j")).ids[0]
    served.estimated(task)
    with pytest.raises(errors.NotFound, match=f"out-{task}; the daemon does not open files"):
        client.open_logs(task, stream="stdout", attempt=None, follow=True)
    assert b"".join(client.logs(task)) == b""


def test_a_follower_that_leaves_is_forgotten(served: Served) -> None:
    key = started(served)
    write(served, key, b"first\n")
    before = served.open_connections
    follower = served.client().logs(key.task, follow=True)
    assert next(follower) == b"first\n"
    follower.close()  # type: ignore[attr-defined]
    until(lambda: served.open_connections == before and served.shell.waiting == 0)


def test_a_log_file_is_found_by_the_attempts_key_and_never_through_a_link(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    key = AttemptKey(TaskId(1), 1)
    files = AttemptFiles(tmp_path / "logs")
    own = Path(files.log_path(key, "stdout"))
    assert own == tmp_path / "logs" / "1.1" / "stdout.log"
    assert files.open_log(key, "stdout") is None  # nothing there yet
    own.parent.mkdir(parents=True)
    own.symlink_to(secret)
    with pytest.raises(OSError, match="symbolic"):
        files.open_log(key, "stdout")
    own.unlink()
    os.mkfifo(own)
    assert files.open_log(key, "stdout") is None


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_that_was_sent_to_a_named_file_is_never_opened_by_the_daemon(
    served: Served, tmp_path: Path, stream: str
) -> None:
    """This holds even for CARMA's own file of another attempt, nor a file below its log directory."""
    victim = started(served)
    write(served, victim, b"not yours")
    elsewhere = tmp_path / "mine.log"
    elsewhere.write_text("hers alone")
    for named in (elsewhere, served.log_paths(victim)[0], served.paths.log_dir / "1.1" / ".." / "1.1" / "stdout.log"):
        task = served.client().submit(served.request(output=str(named), error=str(named))).ids[0]
        served.estimated(task)
        key = served.place(task)
        with pytest.raises(errors.NotFound) as caught:
            read(served, key, stream=stream)
        assert str(named) in caught.value.hint


def hole_of(path: Path, limit_bytes: int) -> None:
    OutputLimit(str(path), limit_bytes).shorten()


def test_output_beyond_its_limit_keeps_its_end_and_says_what_was_removed(served: Served) -> None:
    key = started(served)
    path = served.log_paths(key)[0]
    lines = [f"line {number:07d}\n".encode() for number in range(600_000)]
    write(served, key, b"".join(lines))
    hole_of(path, 4 << 20)
    assert path.stat().st_size == 7_800_000  # positions stay as they were
    assert path.stat().st_blocks * 512 <= 4 << 20
    shown = read(served, key)
    note, _, rest = shown.lstrip(b"\n").partition(b"\n")
    assert (
        note
        == b"[carma: the first 5 MiB of this output were removed; the limit is 4 MiB (setting launch.max_output_mib)]"
    )
    assert b"".join(lines).endswith(rest)
    assert 2 << 20 <= len(rest) <= (2 << 20) + 4096
    assert read(served, key, tail=2) == b"".join(lines[-2:])
    write(served, key, b"more\n")
    assert read(served, key).endswith(lines[-1] + b"more\n")


def test_output_below_its_limit_is_left_alone(served: Served) -> None:
    key = started(served)
    write(served, key, b"x" * 1_000_000)
    hole_of(served.log_paths(key)[0], 4 << 20)
    assert read(served, key) == b"x" * 1_000_000


def test_blocks_that_were_allocated_behind_the_end_are_freed(served: Served) -> None:
    key = started(served)
    path = served.log_paths(key)[0]
    write(served, key, b"short\n")
    with path.open("r+b") as file:
        keep_size = 1
        if ctypes.CDLL(None).fallocate(file.fileno(), keep_size, ctypes.c_int64(0), ctypes.c_int64(64 << 20)) != 0:
            pytest.skip("this file system does not allocate blocks in advance")
    assert path.stat().st_blocks * 512 >= 64 << 20
    hole_of(path, 4 << 20)
    assert path.stat().st_blocks * 512 <= 4 << 20
    assert read(served, key) == b"short\n"


def test_where_holes_cannot_be_made_the_file_is_cut_to_its_end(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    key = started(served)
    path = served.log_paths(key)[0]
    write(served, key, bytes(5 << 20) + b"the end\n")
    monkeypatch.setattr(output_files, "_PUNCH_HOLE_KEEP_SIZE", 1 << 20)  # an unknown flag, which the kernel refuses
    hole_of(path, 4 << 20)
    assert path.stat().st_size < 2 << 20
    assert read(served, key).startswith(b"\n[carma: the first 4 MiB of this output were removed")
    assert read(served, key).endswith(b"the end\n")


def test_a_follower_that_is_overtaken_by_the_removal_goes_on_behind_it(served: Served) -> None:
    key = started(served)
    path = served.log_paths(key)[0]
    write(served, key, b"first\n")
    follower = served.client().logs(key.task, follow=True)
    assert next(follower) == b"first\n"
    write(served, key, b"x" * (8 << 20))
    hole_of(path, 4 << 20)
    write(served, key, b"\nlast\n")
    served.end(key)
    rest = b"".join(follower)
    assert rest.endswith(b"\nlast\n")
    assert b"\0" not in rest
