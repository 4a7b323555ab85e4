"""Log files of ended attempts: closed to their submitter, or replaced by a copy if a process can still write."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from carma.launch import output_files
from carma.launch.output_files import SEALED_MODE, OutputLimit, seal

MIB = 1 << 20


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_that_no_other_process_writes_is_kept_itself(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"output")
    inode = log.stat().st_ino
    reader = os.open(log, os.O_RDONLY)  # as of a client that follows the output
    seal(str(log), MIB)
    os.close(reader)
    assert (log.stat().st_ino, mode(log), log.read_bytes()) == (inode, SEALED_MODE, b"output")


def test_what_a_descriptor_of_before_writes_is_not_in_the_file(tmp_path: Path) -> None:
    log = tmp_path / "log"
    writer = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(writer, b"output")
    OutputLimit(str(log), MIB).seal()
    os.write(writer, b"more")
    os.close(writer)
    assert (mode(log), log.read_bytes()) == (SEALED_MODE, b"output")
    assert os.listdir(tmp_path) == ["log"]


def test_a_copy_has_the_same_positions_and_at_most_the_limit_on_the_disk(tmp_path: Path) -> None:
    """Readers that follow the output go on at their position."""
    log = tmp_path / "log"
    writer = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for _ in range(10):
        os.write(writer, b"line of output\n" * (MIB // 16))
    size = log.stat().st_size
    seal(str(log), 4 * MIB)
    os.close(writer)
    assert log.stat().st_size == size
    assert log.stat().st_blocks * 512 <= 4 * MIB
    data = log.read_bytes()
    assert b"MiB of this output were removed" in data
    kept = data[data.rindex(b"max_output_mib)]\n") :].partition(b"\n")[2]
    assert len(kept) > MIB
    assert (b"line of output\n" * (10 * MIB // 16)).endswith(kept)


def test_a_sealed_file_is_not_touched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"output")
    seal(str(log), MIB)
    monkeypatch.setattr(output_files, "OutputLimit", None)
    seal(str(log), MIB)
    seal(str(tmp_path / "missing"), MIB)


def test_a_full_disk_leaves_the_file_and_no_part_of_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    writer = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.write(writer, b"output")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr(os, "sendfile", full)
        with pytest.raises(OSError, match="full"):
            seal(str(log), MIB)
    assert os.listdir(tmp_path) == ["log"]
    seal(str(log), MIB)  # the next try
    os.write(writer, b"more")
    os.close(writer)
    assert (mode(log), log.read_bytes()) == (SEALED_MODE, b"output")
