"""Where output cannot go, and scripts without an interpreter, are said at submission, not when the task starts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from carma.core.model.values import TaskSpec
from carma.daemon.probes.command_check import check_runnable
from carma.errors import NotRunnable


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user can enter, unlike the directories of pytest."""
    with tempfile.TemporaryDirectory() as made:
        os.chmod(made, 0o755)
        (Path(made) / "file").write_text("")
        (Path(made) / "logs").mkdir()
        (Path(made) / "dangling").symlink_to("not-yet")
        yield Path(made)


def check(place: Path, *, output: str | None = None, error: str | None = None) -> None:
    check_runnable(TaskSpec(command=("/bin/sh",), directory=str(place), output=output, error=error))


@pytest.mark.parametrize(
    "output", ["new", "file", "logs/%j.out", "logs/%x/%j", "%j/out", "dangling", "a%%b", "/dev/null"]
)
def test_what_can_be_written_passes(place: Path, output: str) -> None:
    check(place, output=output, error=output)
    assert sorted(found.name for found in place.iterdir()) == ["dangling", "file", "logs"]  # nothing is made


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("logs", "logs is a directory"),
        ("logs/", "logs is a directory"),
        ("/", "/ is a directory"),
        ("gone/out", "there is no directory .*/gone$"),
        ("gone/%j.out", "there is no directory .*/gone$"),
        ("/nosuch/dir/x", "there is no directory /nosuch/dir$"),
        ("file/out", "file is not a directory"),
        ("slurm-%N.out", "'%N' in --output slurm-%N.out is unknown"),
        ("50%", "'%' in --output 50% is unknown"),
    ],
)
def test_what_cannot_be_written_is_refused_in_words(place: Path, output: str, said: str) -> None:
    with pytest.raises(NotRunnable, match=said):
        check(place, output=output)
    with pytest.raises(NotRunnable, match=said.replace("--output", "--error")):
        check(place, error=output)


def test_the_hint_tells_every_place_that_is_known(place: Path) -> None:
    with pytest.raises(NotRunnable) as refused:
        check(place, output="%N")
    assert all(f"%{letter} " in refused.value.hint for letter in "jAaxtu%")


@pytest.mark.parametrize(
    ("program", "path", "hint"),
    [
        ("train.py", "/bin:python-here", "did you mean: carma submit -- python train.py"),
        ("./train.py", "/nowhere", "did you mean: carma submit -- python3 ./train.py"),
        ("my train.py", "/nowhere", "did you mean: carma submit -- python3 'my train.py'"),
        ("train.sh", "/nowhere", "did you mean: carma submit train.sh"),
        ("./train.sh", "/nowhere", "did you mean: carma submit ./train.sh"),
        ("./file", "/nowhere", "chmod +x "),
        ("other.py", "/nowhere", "give its full path"),
    ],
)
def test_a_script_without_its_interpreter_gets_the_command_that_runs_it(
    place: Path, program: str, path: str, hint: str
) -> None:
    for script in ("train.py", "my train.py", "train.sh"):
        (place / script).write_text("")
    (place / "python-here").mkdir()
    (place / "python-here" / "python").symlink_to("/bin/sh")
    environment = {"PATH": path.replace("python-here", str(place / "python-here"))}
    with pytest.raises(NotRunnable) as caught:
        check_runnable(TaskSpec(command=(program,), directory=str(place), environment=environment))
    assert caught.value.hint.startswith(hint)
