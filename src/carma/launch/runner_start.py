"""How a runner is started, and the order that it gets: what the user submitted, and how the launcher wants it run.

The order contains the submitter's environment, so that it is a file in memory and never one on a disk.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from carma.core.ports import LaunchOrder
from carma.launch import attempt_records as records
from carma.launch.output_paths import named_outputs


def order_record(order: LaunchOrder, environment: Mapping[str, str], **more: object) -> dict[str, object]:
    """`more`: fields that do not follow from the order."""
    spec, owner = order.spec, order.owner
    stdout, stderr = named_outputs(order.key, owner, spec)
    identity = {"uid": owner.uid, "gid": owner.gid, "name": owner.name}
    return {
        "command": list(spec.command),
        "directory": spec.directory,
        "environment": environment,
        "umask": spec.umask,
        "identity": identity if owner.uid != os.geteuid() else None,
        "stdout": stdout,
        "stderr": stderr,
        "grace_s": order.grace_s,
        **more,
    }


def spawn_runner(arguments: list[str], log_path: str, order: bytes) -> int:
    """The pid of the runner, in a session of its own. Raises OSError."""
    write = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    memory = os.memfd_create("carma-order", os.MFD_CLOEXEC)
    try:
        records.write_all(memory, order)
        files = [
            (os.POSIX_SPAWN_DUP2, memory, 0),
            (os.POSIX_SPAWN_OPEN, 1, log_path, write, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ]
        return os.posix_spawn(arguments[0], arguments, os.environ, file_actions=files, setsid=True)
    finally:
        os.close(memory)
