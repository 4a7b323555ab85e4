"""A digest of a command and its files: two commands with the same digest give the same trial.

A process of their owner reads the files (box/digest.py). A process inside a file system that hangs cannot be killed
and is abandoned, up to STUCK_LIMIT for each user.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from carma.core.model.values import Owner
from carma.core.ports import EstimateRequest
from carma.trial.box import digest

LIMIT_S = 20.0
STUCK_LIMIT = 4
# Variables that differ from one login, job or container to the next and that no training reads. A place in a job array
# or among ranks is no noise: scripts choose by it what they train.
_NOISE = re.compile(
    r"PWD|OLDPWD|SHLVL|_|COLUMNS|LINES|WINDOWID|SSH_.*|TERM.*|COLORTERM|DISPLAY|WAYLAND_.*|DBUS_.*|XDG_SESSION.*"
    r"|XDG_RUNTIME_DIR|XAUTHORITY|TMUX.*|STY|CARMA_.*|LS_COLORS|PS1|PROMPT.*|VSCODE_.*|GPG_.*|INVOCATION_ID|JOURNAL_STREAM"
    r"|HOSTNAME|WANDB_.*|KUBERNETES_.*|JOB_ID|SLURMD_.*|SLURM_(?!ARRAY_TASK_ID$|PROCID$).*|LSB_(?!JOBINDEX$).*"
    r"|PBS_(?!ARRAY_INDEX$|ARRAYID$).*|SGE_(?!TASK_ID$).*"
)


class Unanswered(Exception):
    """A file system hangs; the text is the path."""


def fingerprint(request: EstimateRequest) -> str | None:
    """None if it cannot be made; then the trial is not remembered. Raises Unanswered after LIMIT_S at the latest."""
    spec = request.spec
    order = {
        "command": list(spec.command),
        "directory": spec.directory,
        "environment": {name: value for name, value in spec.environment.items() if not _NOISE.fullmatch(name)},
        "owner": request.owner.uid,
        "identity": identity_for(request.owner),
    }
    text = _digest_of(order, request.owner.uid, spec.directory)
    return text if re.fullmatch(r"[0-9a-f]{64}", text) else None


_lock = threading.Lock()
_stuck: dict[int, list[subprocess.Popen[bytes]]] = {}  # by uid: processes inside a file system that hangs


def _digest_of(order: Mapping[str, object], uid: int, directory: str) -> str:
    """What box/digest.py prints; empty if it failed. With memory files, not pipes, neither side waits for the other."""
    if _stuck_of(uid) >= STUCK_LIMIT:
        raise Unanswered(directory)
    with contextlib.ExitStack() as stack:
        given, printed, path = (
            stack.enter_context(os.fdopen(os.memfd_create("carma-digest"), "w+b")) for _ in range(3)
        )
        given.write(json.dumps(order).encode("ascii"))
        given.seek(0)
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-X", "utf8", digest.__file__],
                stdin=given,
                stdout=printed,
                stderr=path,
                cwd="/",
                env={"PATH": os.defpath},
                start_new_session=True,
            )
        except OSError:
            return ""
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            with _lock:
                _stuck.setdefault(uid, []).append(process)
            path.seek(0)
            raise Unanswered(path.read().decode("utf-8", "surrogateescape") or directory) from None
        printed.seek(0)
        return printed.read().decode("ascii", "replace") if code == 0 else ""


def _stuck_of(uid: int) -> int:
    with _lock:
        left = [process for process in _stuck.pop(uid, ()) if process.poll() is None]
        if left:
            _stuck[uid] = left
        return len(left)


def identity_for(owner: Owner) -> dict[str, object] | None:
    """The identity that a process must take before it reads files; None if it has it already."""
    if os.geteuid() != 0 or owner.uid == 0:
        return None
    return {"uid": owner.uid, "gid": owner.gid, "groups": os.getgrouplist(owner.name, owner.gid)}


@functools.lru_cache(maxsize=8)
def folder_digest(folder: Path) -> str:
    """Digest of the part inside the user's interpreter: a new version of it makes new trials."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            found.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()
