"""The first half of the sandbox: the identity of the command, the paths to show, and the namespaces.

Names and groups are looked up here, before the network is gone. Root makes the namespaces directly; another user gets
them through a user namespace in which only their own uid and gid exist.
"""

from __future__ import annotations

import functools
import json
import os
import pwd
import signal
import sys

from carma import cgroups
from carma.trial.box import kernel, supervisor
from carma.trial.box.mounts import answers, is_within, mount_points

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_KERNELS = ("/proc", "/sys", "/dev")  # never shown from outside
_HOST_NAME = "localhost"  # it resolves without a network


def main() -> int:
    order = json.loads(read_line(0))
    for fd in (order["status_fd"], *(entry[0] for entry in order["files"].values())):
        os.set_inheritable(fd, False)
    report = functools.partial(supervisor.report, order["status_fd"])
    try:
        kernel.die_with_parent(signal.SIGKILL)
        open_cgroup(order)
        report(at="the user database")
        look_up_identity(order)
        report(at="a mounted file system")
        ended = check_paths(order)
        if ended is not None:
            report(**ended)
            os._exit(0)
        namespaces(order)
    except OSError as error:
        report(ended="refused", why=error.strerror or str(error))
        return 1
    supervisor.run(order)
    os._exit(0)  # a process that cannot end is left behind


def read_line(fd: int) -> bytes:
    """Reads a line without a buffered file: after the line, standard input is only watched for its end."""
    pieces: list[bytes] = []
    while not pieces or not pieces[-1].endswith(b"\n"):
        piece = os.read(fd, 1 << 16)
        if not piece:
            sys.exit(1)
        pieces.append(piece)
    return b"".join(pieces)


def open_cgroup(order: dict[str, Any]) -> None:
    """`order["join"]`: descriptors with which the command joins its cgroup. If it cannot join, the supervisor counts
    processes and memory instead."""
    order["join"] = []
    if order["scope"]:  # systemd-run has put this process into a cgroup with limits
        order["cgroup"] = list(cgroups.current().directories)
        return
    try:
        for directory in order["cgroup"]:
            order["join"].append(os.open(f"{directory}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
    except OSError:
        order["cgroup"], order["join"], order["limited_by_kernel"] = [], [], False


def look_up_identity(order: dict[str, Any]) -> None:
    """Groups, HOME and names of the owner, as the launcher sets them for the task itself."""
    identity = order["identity"]
    if identity is None:
        order["uid"], order["gid"] = os.geteuid(), os.getegid()
        return
    uid, gid, name = identity["uid"], identity["gid"], identity["name"]
    order["uid"], order["gid"] = uid, gid
    try:
        entry = pwd.getpwuid(uid)
        name, home, shell = entry.pw_name, entry.pw_dir, entry.pw_shell
    except KeyError:  # known to the kernel only, as in containers
        home, shell = "/", "/bin/sh"
    identity["groups"] = os.getgrouplist(name, gid)
    order["environment"].update(HOME=home, USER=name, LOGNAME=name, SHELL=shell)
    order["wanted"].append(home)


def check_paths(order: dict[str, Any]) -> dict[str, Any] | None:
    """Leaves out mounts and paths that hang or are broken. If the working directory is one of them, returns how the run
    ends."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        points = [point for point in mount_points(file.read()) if not any(is_within(point, own) for own in _KERNELS)]
    known: list[str] = order["unanswered"]  # did not answer a short time ago
    directory: str = order["directory"]
    wanted = list(dict.fromkeys([directory, *order["wanted"]]))
    asked = [path for path in dict.fromkeys([*points, *wanted]) if not any(is_within(path, bad) for bad in known)]
    found = answers(asked, order["answer_s"])
    order["points"] = [point for point in points if found.get(point) == 0]
    order["left_out"] = [point for point in points if found.get(point) != 0]
    order["wanted"] = [path for path in wanted if found.get(path) == 0]
    order["unanswered"] = [point for point in points if point not in found]
    if directory not in found:
        waited = {"limit_s": order["answer_s"], "unanswered": order["unanswered"]}
        return {"ended": "unanswered", "why": directory, **waited}
    if found[directory]:
        why = os.strerror(found[directory])
        return {"ended": "not_started", "why": f"cannot enter the working directory {directory}: {why}"}
    return None


def namespaces(order: dict[str, Any]) -> None:
    apart = kernel.NEWNS | kernel.NEWUTS | kernel.NEWIPC | kernel.NEWPID | kernel.NEWNET
    order["own_users"] = os.geteuid() != 0
    if order["own_users"]:
        uid, gid = os.geteuid(), os.getegid()
        kernel.unshare(kernel.NEWUSER | apart)
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"{uid} {uid} 1")
        write("/proc/self/gid_map", f"{gid} {gid} 1")
    else:
        kernel.unshare(apart)
    kernel.start_loopback()
    kernel.set_host_name(_HOST_NAME)


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
