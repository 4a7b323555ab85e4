"""One word for a command in the state of its files: where two are equal, the same trial would come out."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from carma.core.model import Owner
from carma.core.ports import EstimateRequest
from carma.estimate.box import look

LIMIT_S = 20.0
# What differs from one login, job or container to the next and no training looks at. A place in a job array or among
# ranks is no noise: scripts choose by it what they train.
_NOISE = re.compile(
    r"PWD|OLDPWD|SHLVL|_|COLUMNS|LINES|WINDOWID|SSH_.*|TERM.*|COLORTERM|DISPLAY|WAYLAND_.*|DBUS_.*|XDG_SESSION.*"
    r"|XDG_RUNTIME_DIR|XAUTHORITY|TMUX.*|STY|CARMA_.*|LS_COLORS|PS1|PROMPT.*|VSCODE_.*|GPG_.*|INVOCATION_ID|JOURNAL_STREAM"
    r"|HOSTNAME|WANDB_.*|KUBERNETES_.*|JOB_ID|SLURMD_.*|SLURM_(?!ARRAY_TASK_ID$|PROCID$).*|LSB_(?!JOBINDEX$).*"
    r"|PBS_(?!ARRAY_INDEX$|ARRAYID$).*|SGE_(?!TASK_ID$).*"
)


def fingerprint(request: EstimateRequest) -> str | None:
    """None when it cannot be told in time: then nothing is remembered."""
    spec = request.spec
    order = {
        "command": list(spec.command),
        "directory": spec.directory,
        "environment": {name: value for name, value in spec.environment.items() if not _NOISE.fullmatch(name)},
        "owner": request.owner.uid,
        "identity": identity_for(request.owner),
    }
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-X", "utf8", look.__file__],
            input=json.dumps(order).encode("ascii"),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=LIMIT_S,
            cwd="/",
            env={"PATH": os.defpath},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = done.stdout.decode("ascii", "replace")
    return text if done.returncode == 0 and re.fullmatch(r"[0-9a-f]{64}", text) else None


def identity_for(owner: Owner) -> dict[str, object] | None:
    """Whom a helper process must become before it looks; None where it is the owner already."""
    if os.geteuid() != 0 or owner.uid == 0:
        return None
    return {"uid": owner.uid, "gid": owner.gid, "groups": os.getgrouplist(owner.name, owner.gid)}


@functools.lru_cache(maxsize=8)
def folder_digest(folder: Path) -> str:
    """Of our own part inside the user's interpreter: a new version of it makes new trials."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            found.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()
