"""The outer half: who the program is to be, the namespaces, and a first process in them that stands over the rest.

Names and groups are looked up out here, where the network still is. As root the namespaces are made outright; anybody
else gets them through a user namespace in which they are nobody but themselves.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import signal
import sys

from carma.estimate.box import kernel, watch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NICENESS = 10
_HOST_NAME = "localhost"  # one that resolves without a network


def main() -> int:
    order = json.loads(read_line(0))
    for fd in (order["status_fd"], *(entry[0] for entry in order["files"].values())):
        os.set_inheritable(fd, False)
    try:
        be_modest()
        learn_identity(order)
        look_at(order["wanted"])
        namespaces(order)
        first = os.fork()
    except OSError as error:
        watch.tell(order["status_fd"], {"ended": "refused", "why": error.strerror or str(error)})
        return 1
    if first == 0:
        watch.stand_over(order)
    os.close(order["status_fd"])
    os.waitpid(first, 0)
    return 0


def read_line(fd: int) -> bytes:
    """Not through a buffered file: what stays open behind the line is only waited on."""
    pieces: list[bytes] = []
    while not pieces or not pieces[-1].endswith(b"\n"):
        piece = os.read(fd, 1 << 16)
        if not piece:
            sys.exit(1)
        pieces.append(piece)
    return b"".join(pieces)


def be_modest() -> None:
    """Last in line for the processors, first to go when the machine runs out of memory."""
    kernel.die_with_parent(signal.SIGKILL)
    os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # some containers forbid it
        file.write("1000")


def learn_identity(order: dict[str, Any]) -> None:
    """As the launcher does for the task itself: groups, HOME and names are the owner's."""
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


def look_at(paths: list[str]) -> None:
    """Directories that are mounted when somebody looks at them are mounted out here, not in the box."""
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            os.stat(path)


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
