"""`carma train` checks that it can write to its directory before it reads or trains."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
from pathlib import Path

import pytest

from carma.cli import main
from carma.errors import Refused, Usage
from gpumemnet.directories import check_folder, make_folder, write_whole

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--evaluate", "--report", "PLACE"], "--report names a directory"),
        (["--out", "PLACE"], "--out names a directory"),
        (["--out", "PLACE/below"], "--out names a directory"),
    ],
)
def test_an_unwritable_directory_is_an_error_before_the_data_is_read(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("torch")
    (tmp_path / "file").write_text("no directory")
    place = [word.replace("PLACE", str(tmp_path / "file")) for word in words]
    assert main(["train", "nowhere.parquet", *place]) == 2
    told = capsys.readouterr().err
    assert f"{place[-1]} cannot be written to: Not a directory" in told
    assert said in told


def test_the_users_own_place_is_looked_at_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("torch")
    (tmp_path / "share").write_text("no directory")
    monkeypatch.delenv("CARMA_HOME", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    assert main(["train", "nowhere.parquet", "--install"]) == 2
    assert "--install writes there" in capsys.readouterr().err


def test_looking_leaves_nothing(tmp_path: Path) -> None:
    check_folder(tmp_path / "a" / "b")
    check_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []
    make_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_place_that_takes_names_and_no_bytes_is_full(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
            with pytest.raises(Usage, match="cannot be written to: File too large"):
                check_folder(tmp_path)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    write_whole(tmp_path / "f", b"one")
    write_whole(tmp_path / "f", b"two")
    assert (tmp_path / "f").read_bytes() == b"two"
    (tmp_path / "folder").mkdir()
    with pytest.raises(Refused, match="folder cannot be written: Is a directory"):
        write_whole(tmp_path / "folder", b"three")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["f", "folder"]


def test_two_that_write_one_file_at_once_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    at_once: list[Path] = []

    def both(source: Path, target: Path) -> None:
        """The first is about to put its file in place when the second writes all of its own."""
        if not at_once:
            at_once.append(source)
            write_whole(path, b"second")
            assert path.read_bytes() == b"second"
        os.rename(source, target)

    monkeypatch.setattr("gpumemnet.directories.os.replace", both)
    write_whole(path, b"first, and longer")
    assert path.read_bytes() == b"first, and longer"
    assert [each.name for each in tmp_path.iterdir()] == ["f"]


def test_what_a_killed_writer_left_is_taken_away_by_a_later_one(tmp_path: Path) -> None:
    for name in ("f.0123abcd.part", "f.notes.part", "g.0123abcd.part", "f.part"):
        (tmp_path / name).write_bytes(b"half")
    with (tmp_path / "f.89abcdef.part").open("wb") as writing:
        fcntl.flock(writing, fcntl.LOCK_EX)  # as one that is still at it
        write_whole(tmp_path / "f", b"one")
    left = sorted(each.name for each in tmp_path.iterdir())
    assert left == ["f", "f.89abcdef.part", "f.notes.part", "f.part", "g.0123abcd.part"]
