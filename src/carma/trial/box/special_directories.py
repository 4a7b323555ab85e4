"""The directories that differ from the machine's: /dev, /proc, /sys, /run."""

from __future__ import annotations

import contextlib
import os
import shutil

from carma.trial.box import kernel, results

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from carma.trial.box.filesystem import Tree

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_LINKS = {"fd": "fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
# Files with which root changes the machine, even without capabilities.
_MACHINES = ("sys", "sysrq-trigger", "irq", "bus", "fs")
OUT, INSIDE, KEEP = "/run/carma/out", "/run/carma/inside", "/run/carma/keep"
_KEEP_INODES = 1024
_PLAIN = kernel.MS_NOSUID | kernel.MS_NODEV


def make_devices(tree: Tree, shared_memory_bytes: int) -> None:
    """Devices of the sandbox. None is a GPU."""
    dev = tree.path("/dev")
    kernel.mount("tmpfs", dev, "tmpfs", kernel.MS_NOSUID, "size=1m,mode=755")
    for name in DEVICES:
        if os.path.exists(f"/old/dev/{name}"):
            os.close(os.open(f"{dev}/{name}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666))
            kernel.bind(f"/old/dev/{name}", f"{dev}/{name}")
    for name, target in _LINKS.items():
        os.symlink(f"/proc/self/{target}", f"{dev}/{name}")
    os.mkdir(f"{dev}/shm")
    kernel.mount("tmpfs", f"{dev}/shm", "tmpfs", _PLAIN, f"size={shared_memory_bytes},mode=1777")
    os.mkdir(f"{dev}/pts")
    with contextlib.suppress(OSError):  # terminals are optional
        kernel.mount("devpts", f"{dev}/pts", "devpts", kernel.MS_NOSUID | kernel.MS_NOEXEC, "newinstance,ptmxmode=666")
        os.symlink("pts/ptmx", f"{dev}/ptmx")


def mount_proc(tree: Tree) -> None:
    """Must be called by a process in the pid namespace of the sandbox."""
    kernel.mount("proc", tree.path("/proc"), "proc", _PLAIN | kernel.MS_NOEXEC)


def protect_proc(tree: Tree) -> int:
    """Returns a descriptor of /proc/sys that can still be written to."""
    proc = tree.path("/proc")
    sysctl = os.open(f"{proc}/sys", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for name in _MACHINES:
        if os.path.exists(f"{proc}/{name}"):
            kernel.bind(f"{proc}/{name}", f"{proc}/{name}", recursive=True)
            kernel.make_read_only(f"{proc}/{name}")
    return sysctl


def make_sys(tree: Tree) -> None:
    if os.path.isdir("/old/sys"):
        kernel.bind("/old/sys", tree.path("/sys"), recursive=True)
        kernel.make_read_only(tree.path("/sys"))


def empty_run(tree: Tree, size_bytes: int) -> None:
    """The machine's /run holds sockets of daemons. Directories in which a user works are restored."""
    run = tree.path("/run")
    os.makedirs(run, exist_ok=True)
    kernel.mount("tmpfs", run, "tmpfs", _PLAIN, f"size={size_bytes},mode=755")
    tree.place_wanted_in_run()


def make_own(tree: Tree, order: dict[str, Any]) -> int | None:
    """The directory for results, the files for the interpreter, and a copy of the persistent directory. Returns a
    descriptor of the persistent directory on the host; None without one."""
    for path in (OUT, KEEP):
        os.makedirs(tree.path(path), 0o755)
    size = order["limits"]["keep_mib"] * kernel.MIB
    kernel.mount("tmpfs", tree.path(KEEP), "tmpfs", _PLAIN, f"size={size},nr_inodes={_KEEP_INODES}")
    for path in (OUT, KEEP):
        os.chmod(tree.path(path), 0o700)
        os.chown(tree.path(path), order["uid"], order["gid"])
    # A copy: the owner may not be able to read the original.
    shutil.copytree("/old" + order["inside"], tree.path(INSIDE))
    for folder, _, names in os.walk(tree.path(INSIDE)):
        os.chmod(folder, 0o755)
        for name in names:
            os.chmod(os.path.join(folder, name), 0o644)
    return None if order["keep"] is None else _copy_kept(tree, order["keep"], size)


def _copy_kept(tree: Tree, keep: str, size: int) -> int:
    with tree.as_owner():
        host = kernel.open_folder("/old" + keep)
        inside = kernel.open_folder(tree.path(KEEP))
        results.copy_kept(host, inside, size)
    os.close(inside)
    return host
