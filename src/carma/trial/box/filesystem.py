"""The file system of the sandbox: a copy-on-write view of the machine's.

Overlays cover the machine's file systems, with changes in memory of a fixed size. Where that fails (another user's FUSE
mount, for example) a file system is read-only. The kernel lets root mount one overlay over each file system. In a user
namespace it refuses any directory that contains mount points: such a directory is created again and its entries are
overlaid one by one. Sockets in a lower layer lead nowhere, so daemons of the host cannot be reached.

Three directories differ from the machine's: /dev has no GPU, /run is empty except for CARMA's files, /proc belongs to
the pid namespace.
"""

from __future__ import annotations

import contextlib
import os
import stat

from carma.trial.box import kernel
from carma.trial.box.mounts import is_below, is_within, nearest_below

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

ENTRIES_LIMIT = 256  # of a directory that is created again; of a larger one only the wanted entries
_OLD, _NEW, _CHANGES = "/old", "/new", "/changes"
_OWN = ("/proc", "/sys", "/dev", "/run")
# Storage of containers that run on this machine: many mounts, and no working directories.
_STORES = ("/var/lib/docker", "/var/lib/containerd", "/var/lib/containers", "/var/lib/kubelet", "/var/snap", "/snap")


class Tree:
    """Call `build`, then mount special directories onto `path(...)`, then `enter`."""

    def __init__(self, order: dict[str, Any], report: Callable[..., None]) -> None:
        """`report` is called with each path (`at`) before a call on it that may hang."""
        self._report = report
        self._uid, self._gid = order["uid"], order["gid"]
        self._own_users = order["own_users"]
        self._wanted: list[str] = [os.path.realpath(path) for path in order["wanted"]] + order["wanted"]
        self._scratch_bytes = order["limits"]["scratch_mib"] * kernel.MIB
        self._points = [point for point in order["points"] if self._shows(point)]
        self._left_out: list[str] = order["left_out"]  # mounts that hang or are broken: empty in the sandbox
        self._overlays = 0
        self.read_only: list[str] = []  # directories without an overlay that are writable outside

    def path(self, name: str) -> str:
        return _NEW + name

    def build(self) -> None:
        kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_SLAVE)
        kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, f"size={self._scratch_bytes}")
        os.chdir("/tmp")
        os.umask(0)
        for name in (_OLD, _NEW, _CHANGES):
            os.mkdir("." + name, 0o755)
        kernel.change_root(".", "." + _OLD)
        os.chdir("/")
        self._place("/")

    def place_wanted_in_run(self) -> None:
        """Removable media and the like, where a user may work. Call it once /run is empty."""
        for wanted in self._wanted:
            top = "/".join(wanted.split("/")[:3])
            if is_below(wanted, "/run") and os.path.isdir(_OLD + top) and not os.path.lexists(_NEW + top):
                os.mkdir(_NEW + top, 0o755)
                self._place(top)

    def enter(self) -> int:
        """Makes everything outside unreachable. Returns a descriptor of the file system that holds the changes."""
        changes = kernel.open_folder(_CHANGES)
        os.chdir(_NEW)
        kernel.change_root(".", ".")
        kernel.detach(".")
        os.chdir("/")
        return changes

    def _shows(self, point: str) -> bool:
        if any(is_within(point, own) for own in _OWN):
            return is_below(point, "/run") and self._leads_to_wanted(point)
        return not any(is_below(point, store) for store in _STORES) or self._leads_to_wanted(point)

    def _leads_to_wanted(self, path: str) -> bool:
        return any(is_within(wanted, path) for wanted in self._wanted)

    def _place(self, path: str) -> None:
        """Shows in the sandbox what is at that path outside; its mount point exists already."""
        source = _OLD + path
        self._report(at=path)
        try:
            status = os.stat(source, follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode):
                self._read_only(path)
            elif self._lay_over(path, status):
                for point in nearest_below(path, self._points):
                    if os.path.lexists(_NEW + point):
                        self._place(point)
            elif any(is_below(point, path) for point in (*self._points, *self._left_out)) or path == "/":
                self._make_anew(path, status)
            else:
                self._read_only(path)
        except OSError:
            # The command could not have read it either: no permission, or a mount whose server has gone meanwhile.
            if path == "/":
                raise

    def _lay_over(self, path: str, status: os.stat_result) -> bool:
        self._overlays += 1
        changes = f"{_CHANGES}/{self._overlays}"
        for folder in (changes, changes + "/upper", changes + "/work"):
            os.mkdir(folder, 0o755)
        self._like(changes + "/upper", status)
        if self._own_users:
            self._prepare_parents(path, changes + "/upper")
        try:
            with self.as_owner():
                lower = os.open(_OLD + path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    # By descriptor: commas and colons in a path would end the option.
                    options = f"lowerdir={_OLD}/proc/self/fd/{lower},upperdir={changes}/upper,workdir={changes}/work"
                    extra = ",userxattr" if self._own_users else ",redirect_dir=on"
                    flags = kernel.MS_NOSUID | kernel.MS_NODEV
                    kernel.mount("overlay", _NEW + path, "overlay", flags, options + extra)
                finally:
                    os.close(lower)
        except OSError:
            return False
        return True

    def _prepare_parents(self, path: str, upper: str) -> None:
        """Creates the parent directories of wanted paths in the upper layer. In a user namespace the kernel cannot copy
        another user's directory, so nothing could be written below it."""
        for wanted in self._wanted:
            if not is_below(wanted, path):
                continue
            parent = ""
            for name in wanted[len(path.rstrip("/")) + 1 :].split("/"):
                parent += "/" + name
                with contextlib.suppress(OSError):
                    status = os.stat(_OLD + path + parent, follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode):
                        if not os.path.isdir(upper + parent):
                            os.mkdir(upper + parent)
                        self._like(upper + parent, status)
                        continue
                break

    def _make_anew(self, path: str, status: os.stat_result) -> None:
        if path == "/":
            kernel.bind(_NEW, _NEW)
        self._like(_NEW + path, status)
        for name in self._names(path):
            inner = ("" if path == "/" else path) + "/" + name
            if inner in self._left_out:
                os.mkdir(_NEW + inner, 0o755)
                continue
            if inner in self._points:
                self._report(at=inner)
            try:
                status = os.stat(_OLD + inner, follow_symlinks=False)
            except OSError:  # as in _place
                continue
            with contextlib.suppress(FileNotFoundError, PermissionError):
                self._add(inner, status)

    def _add(self, path: str, status: os.stat_result) -> None:
        if stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink(_OLD + path), _NEW + path)
        elif stat.S_ISDIR(status.st_mode):
            os.mkdir(_NEW + path, 0o755)
            if path not in _OWN:
                self._place(path)
        elif stat.S_ISREG(status.st_mode):
            os.close(os.open(_NEW + path, os.O_CREAT | os.O_WRONLY | os.O_EXCL | os.O_CLOEXEC, 0o644))
            self._read_only(path)

    def _names(self, path: str) -> list[str]:
        depth = len(path.rstrip("/")) + 1
        needed = {point[depth:].split("/")[0] for point in (*self._points, *self._wanted) if is_below(point, path)}
        try:
            listed = os.listdir(_OLD + path)
        except PermissionError:  # may be entered but not listed, like /home on many servers
            listed = []
        return sorted(needed.union(listed) if len(listed) <= ENTRIES_LIMIT else needed)

    def _read_only(self, path: str) -> None:
        kernel.bind(_OLD + path, _NEW + path, recursive=True)
        kernel.make_read_only(_NEW + path)
        if os.path.isdir(_NEW + path) and not os.statvfs(_OLD + path).f_flag & os.ST_RDONLY:
            self.read_only.append(path)

    def _like(self, folder: str, status: os.stat_result) -> None:
        """The top of an overlay shows the attributes of its upper directory."""
        with contextlib.suppress(OSError):  # an owner who does not exist in this user namespace
            os.chown(folder, status.st_uid, status.st_gid)
        os.chmod(folder, stat.S_IMODE(status.st_mode))

    @contextlib.contextmanager
    def as_owner(self) -> Iterator[None]:
        """Makes file system calls as the owner of the task. An overlay reads its lower layer as the user that mounted
        it."""
        if self._own_users:
            yield
            return
        kernel.act_on_files_as(self._uid, self._gid)
        try:
            yield
        finally:
            kernel.act_on_files_as(0, 0)
