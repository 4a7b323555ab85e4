"""What the command writes stays in memory of a fixed size; what is kept between runs is copied back within a limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from carma.trial.box.special_directories import KEEP
from carma.trial.sandbox import SandboxLimits
from tests.boxes import PATIENCE_S, SandboxVariant, own

LIMITS = SandboxLimits(seconds=PATIENCE_S, memory_mib=512, scratch_mib=64, keep_mib=16)
MIB = 2**20


@pytest.fixture
def keep(variant: SandboxVariant, folder: Path) -> Path:
    made = folder / "keep"
    made.mkdir(mode=0o700)
    return own(made, variant.owner)


def size_of(keep: Path) -> int:
    return sum(path.lstat().st_size for path in keep.rglob("*"))


def test_a_large_file_in_the_kept_directory_never_reaches_the_disk(
    variant: SandboxVariant, folder: Path, keep: Path
) -> None:
    script = (
        f"head -c 200000000 /dev/zero > {KEEP}/big; echo $?; ls -s {KEEP}; rm {KEEP}/big; echo small > {KEEP}/small"
    )
    ended = variant.run(script, folder, keep=keep, limits=LIMITS)
    assert ended.status.ended == "exit", ended.status
    assert "No space left" in ended.status.stderr
    assert [path.name for path in keep.iterdir()] == ["small"]


def test_nothing_reaches_the_disk_before_the_end(variant: SandboxVariant, folder: Path, keep: Path) -> None:
    """The command is killed at its limit while it writes."""
    script = f"while :; do head -c 10000000 /dev/zero > {KEEP}/tmp$((i=i+1)); done"
    limits = SandboxLimits(seconds=2, memory_mib=512, scratch_mib=64, keep_mib=16)
    assert variant.run(script, folder, keep=keep, limits=limits).status.ended == "time"
    assert size_of(keep) == 0


def test_many_small_files_are_limited_too(variant: SandboxVariant, folder: Path, keep: Path) -> None:
    ended = variant.run(f"i=0; while [ $i -lt 3000 ]; do : > {KEEP}/f$i || exit 3; i=$((i+1)); done", folder, keep=keep)
    assert ended.status.code != 0
    assert len(list(keep.iterdir())) < 1_100


def test_the_limit_is_for_all_runs_together(variant: SandboxVariant, folder: Path, keep: Path) -> None:
    for name in ("a", "b", "c"):
        # The files of earlier runs are deleted in the sandbox, so that there is room for another.
        script = f"rm -f {KEEP}/*; head -c 10000000 /dev/zero > {KEEP}/{name}"
        assert variant.run(script, folder, keep=keep, limits=LIMITS).status.code == 0
    assert size_of(keep) <= LIMITS.keep_mib * MIB


def test_only_regular_files_come_back_and_they_are_their_owners(
    variant: SandboxVariant, folder: Path, keep: Path
) -> None:
    secret = folder / "secret"
    secret.write_text("secret")
    secret.chmod(0o600)
    script = (
        f"cd {KEEP}; ln -s {secret} link; mkfifo fifo; mkdir folder; echo x > folder/x; echo x > .hidden; "
        "echo x > tmpabc.so; echo x > 'odd name'; echo good > shim-1.so; chmod 4755 shim-1.so"
    )
    assert variant.run(script, folder, keep=keep, limits=LIMITS).status.code == 0
    assert [path.name for path in keep.iterdir()] == ["shim-1.so"]
    status = (keep / "shim-1.so").lstat()
    assert (status.st_uid, status.st_mode & 0o7777, (keep / "shim-1.so").read_text()) == (
        variant.owner.uid,
        0o600,
        "good\n",
    )


def test_a_link_that_the_owner_put_into_the_kept_directory_is_not_followed(
    variant: SandboxVariant, folder: Path, keep: Path
) -> None:
    target = folder / "target"
    target.write_text("before")
    for name in ("shim-1.so", ".part-shim-1.so"):
        os.symlink(target, keep / name)
        os.lchown(keep / name, variant.owner.uid, variant.owner.gid)
    ended = variant.run(f"ls -A {KEEP}; echo after > {KEEP}/shim-1.so", folder, keep=keep, limits=LIMITS)
    assert (ended.status.code, ended.status.stdout) == (0, "")
    assert target.read_text() == "before"
    assert (keep / "shim-1.so").read_text() == "after\n"
    assert not (keep / "shim-1.so").is_symlink()


def test_a_changed_file_replaces_the_old_one(variant: SandboxVariant, folder: Path, keep: Path) -> None:
    for text in ("one", "three", "seven"):
        assert variant.run(f"echo {text} > {KEEP}/shim", folder, keep=keep, limits=LIMITS).status.code == 0
        assert (keep / "shim").read_text() == f"{text}\n"


def test_files_of_the_machine_do_not_change(variant: SandboxVariant, folder: Path) -> None:
    before = {path.name for path in folder.iterdir()}
    ended = variant.run("head -c 200000000 /dev/zero > big; ls -l big", folder, limits=LIMITS)
    assert "No space left" in ended.status.stderr
    assert list((folder / "work").iterdir()) == []
    assert {path.name for path in folder.iterdir()} - before == {"inside"}
