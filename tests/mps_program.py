"""A substitute for NVIDIA's control program, its daemon and its server: real processes with the real names.

It has the properties that the launcher relies on: `-d` returns when the daemon runs and has written its pid file; a
server is a child of the daemon; commands come on standard input; `quit` ends servers and daemon. Files beside it change
its behaviour.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from carma import procfs
from carma.launch import mps_control
from carma.launch.mps_control import CONTROL, SERVER
from carma.testing.launcher_contract import until
from tests.launch_orders import gone

# `clients`: the pids that it lists. `refuse`: -d fails. `hang`: the program never returns. `no-servers`: servers die at
# once. `deaf`: quit does nothing.
_CONTROL = r"""#!/bin/sh
here=${0%/*}
pipes=$CUDA_MPS_PIPE_DIRECTORY
pid_file=$pipes/nvidia-cuda-mps-control.pid
say() { echo "[2026-01-01 00:00:00.000 Control $$] $*" >> "$CUDA_MPS_LOG_DIRECTORY/control.log"; }
end() {
    for pid in $(cat "$pipes/servers" 2> /dev/null); do kill "$pid" 2> /dev/null; done
    rm -f "$pid_file"
    exit 0
}
if [ -e "$here/hang" ]; then while :; do sleep 0.1; done; fi
case $1 in
-d)
    echo start >> "$here/starts"
    env > "$pipes/environment"
    if [ -e "$here/refuse" ]; then echo "An instance of this daemon is already running"; exit 1; fi
    mkfifo "$pipes/control" "$pipes/never"
    setsid "$0" --daemon < /dev/null > /dev/null 2>&1 &
    while [ ! -s "$pid_file" ]; do sleep 0.01; done
    ;;
--daemon)
    if [ -e "$here/deaf" ]; then trap '' TERM; fi
    echo $$ > "$pid_file.new" && mv "$pid_file.new" "$pid_file"
    exec 3<> "$pipes/control"
    while read -r word rest <&3; do
        case $word in
        start_server)
            say "Starting new server for user ${rest#-uid }"
            if [ -e "$here/no-servers" ]; then say "Server 95 exited with status 1"; continue; fi
            "$here/nvidia-cuda-mps-server" 3<&- &
            echo $! >> "$pipes/servers"
            ;;
        quit) [ -e "$here/deaf" ] || end ;;
        esac
    done
    ;;
*)
    if ! kill -0 "$(cat "$pid_file" 2> /dev/null)" 2> /dev/null; then
        echo "Cannot find MPS control daemon process"
        exit 1
    fi
    while read -r word rest; do
        case $word in
        get_server_list) cat "$pipes/servers" 2> /dev/null ;;
        get_server_status) echo ACTIVE ;;
        get_client_list) cat "$here/clients" 2> /dev/null ;;
        terminate_client) kill -0 "${rest#* }" && echo "$rest" >> "$here/terminated" ;;
        *) echo "$word $rest" > "$pipes/control" ;;
        esac
    done
    ;;
esac
exit 0
"""
# Waits for words that never come, without a process of its own to wait with.
_SERVER = '#!/bin/sh\nread -r nothing < "$CUDA_MPS_PIPE_DIRECTORY/never"\n'


class Program:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, text in ((CONTROL, _CONTROL), (SERVER, _SERVER)):
            path = folder / name
            path.write_text(text)
            path.chmod(0o755)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """First in PATH; a real one is never found."""
        patch.setenv("PATH", f"{self.folder}:{os.environ['PATH']}")
        patch.setattr(mps_control, "_SYSTEM_PATH", "/usr/bin:/bin")

    def behave(self, how: str, *, always: bool = True) -> None:
        if always:
            (self.folder / how).touch()
        else:
            (self.folder / how).unlink()

    @property
    def terminated(self) -> list[str]:
        """`SERVER CLIENT` of each client that was alive when it was terminated."""
        path = self.folder / "terminated"
        return path.read_text().splitlines() if path.exists() else []

    def has_clients(self, *pids: int) -> None:
        (self.folder / "clients").write_text("".join(f"{pid}\n" for pid in pids))

    @property
    def starts(self) -> int:
        path = self.folder / "starts"
        return path.read_text().count("\n") if path.exists() else 0


@contextlib.contextmanager
def short_home() -> Iterator[Path]:
    """A short path, since sockets lie below it, and one that others may pass through. What `mps` in it has on record is
    ended with it."""
    folder = Path(tempfile.mkdtemp(prefix="carma-mps-"))
    folder.chmod(0o755)
    (folder / "bin").mkdir(mode=0o755)
    try:
        yield folder
    finally:
        for record in (folder / "mps").glob("*.json"):
            kept = json.loads(record.read_bytes())
            for one in (kept["control"], *kept["servers"]):
                procfs.send(one["pid"], one["start_ticks"], signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    until(lambda: gone(pid))
