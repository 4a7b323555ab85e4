"""A systemd unit for this installation, as text. The administrator checks and copies it; nothing is installed here."""

from __future__ import annotations

import sys
from pathlib import Path

_SYSTEM = """\
# carma: lets deep-learning tasks share the GPUs of this server
# Copy to /etc/systemd/system/carma.service, then: systemctl enable --now carma
[Unit]
Description=CARMA, collocation of deep-learning tasks on GPUs
After=network.target nvidia-persistenced.service

[Service]
Type=notify
# A new version may convert a large database before it is ready.
TimeoutStartSec=infinity
ExecStart={command} up
# Only the daemon is stopped: tasks continue, and the next daemon adopts them.
KillMode=process
# The daemon creates a cgroup for each task: to find all its processes and to limit its GPU memory (drivers from 615).
# DelegateSubgroup needs systemd 254. Older versions ignore it with a warning; those limits are then not available.
Delegate=yes
DelegateSubgroup=daemon
# A task that runs out of host memory, or starts many threads, is no reason to stop the daemon or to stop the task.
OOMPolicy=continue
TasksMax=infinity
Restart=on-failure
RestartSec=2
StateDirectory=carma
StateDirectoryMode=0755
RuntimeDirectory=carma
RuntimeDirectoryMode=0755
RuntimeDirectoryPreserve=yes
LimitNOFILE=65536
OOMScoreAdjust=-500
# Tasks need what users need (their homes, devices, groups): no sandboxing of the service here.

[Install]
WantedBy=multi-user.target
"""

_USER = """\
# carma: lets deep-learning tasks share the GPUs of this machine, for one user
# Copy to ~/.config/systemd/user/carma.service, then: systemctl --user enable --now carma
# To keep it (and its tasks) after you log out: loginctl enable-linger
[Unit]
Description=CARMA, collocation of deep-learning tasks on GPUs

[Service]
Type=notify
ExecStart={command} up
# Only the daemon is stopped: tasks continue, and the next daemon adopts them.
KillMode=process
# The daemon creates cgroups below its own, to limit trial runs. DelegateSubgroup needs systemd 254.
Delegate=yes
DelegateSubgroup=daemon
# A task that runs out of host memory is no reason to stop the daemon.
OOMPolicy=continue
Restart=on-failure
RestartSec=2
LimitNOFILE=65536

[Install]
WantedBy=default.target
"""


def text(*, user: bool, program: Path | None = None) -> str:
    """The unit for the whole server (run by root), or for one user."""
    return (_USER if user else _SYSTEM).format(command=_quoted(program or _program()))


def _program() -> Path:
    """The `carma` next to this Python: a unit for a virtual environment needs no activation."""
    return Path(sys.executable).parent / "carma"


def _quoted(program: Path) -> str:
    """As systemd reads a command line: `%` starts a specifier, a space ends a word."""
    escaped = str(program).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"' if any(character.isspace() for character in escaped) else escaped
