"""Virtual GPUs are files that the tasks of all users share. They are for trying CARMA out and separate no users.

Two properties still hold: no user can reach files outside that directory through them, and the daemon survives.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import until
from tests.multiuser.people import ROOT, Person
from tests.multiuser.serving import ask_as, root_daemon

Attack = Callable[[Path, Path], object]


def replace_by_link(folder: Path, target: Path) -> None:
    for name in ("state.json", "state.next", "lock"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)


def replace_by_pipe(folder: Path, _: Path) -> None:
    for name in ("state.json", "lock"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)


def replace_by_folder(folder: Path, _: Path) -> None:
    for name in ("state.json", "state.next", "lock"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()


def write_nonsense(folder: Path, _: Path) -> None:
    (folder / "state.json").unlink(missing_ok=True)
    (folder / "state.json").write_bytes(bytes(range(256)))


def write_wrong_numbers(folder: Path, _: Path) -> None:
    """Indices, times and demands that no GPU has."""
    text = (folder / "state.json").read_text()
    process = '{"pid": 1, "start_ticks": 1, "gpus": [0, 99, -1], "memory_mib": -5, "wanted_s": -1e308}'
    (folder / "new").write_text(text.replace('"processes":[]', f'"processes":[{process}]').replace(":0.0", ":-1e300"))
    (folder / "new").rename(folder / "state.json")


def replace_by_hard_link(folder: Path, target: Path) -> None:
    """The link needs a kernel without fs.protected_hardlinks. The next daemon replaces the damaged state."""
    write_nonsense(folder, target)
    (folder / "lock").unlink()
    os.link(target, folder / "lock")


ATTACKS: dict[str, Attack] = {
    function.__name__: function
    for function in (replace_by_link, replace_by_pipe, replace_by_folder, write_nonsense, write_wrong_numbers)
}


@pytest.mark.parametrize("attack", [*ATTACKS.values(), replace_by_hard_link], ids=[*ATTACKS, "replace_by_hard_link"])
def test_the_files_of_virtual_gpus_lead_root_nowhere_and_do_not_end_the_daemon(
    alice: Person, bob: Person, attack: Attack
) -> None:
    with root_daemon(monitor__period_s=0.1) as daemon:
        folder = daemon.paths.vgpu_dir / "devices"
        secret = daemon.home / "secret"
        secret.write_text("root's")
        secret.chmod(0o600)
        (ROOT if attack is replace_by_hard_link else alice).act(lambda: attack(folder, secret))
        assert daemon.process is not None
        before = daemon.client.server().now
        until(lambda: ask_as(bob, daemon, "GET", "/server").json["now"] > before + 0.5, "several samples were taken")
        assert ask_as(bob, daemon, "GET", "/gpus").status == 200
        assert daemon.answers()
        daemon.kill()
        process = daemon.spawn()
        until(lambda: process.poll() is not None or daemon.answers(), "the next daemon serves or refuses")
        assert (secret.read_text(), stat.S_IMODE(secret.stat().st_mode)) == ("root's", 0o600)
