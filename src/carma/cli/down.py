"""`carma down`: asks the daemon to end and waits until it is gone."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from carma.cli.verb import verb
from carma.errors import CarmaError, Unreachable

LIMIT_S = 120.0
LOOK_S = 0.05
EXAMPLES = """
carma down            running tasks go on; the next `carma up` adopts them
carma down --cancel   stop them first
"""


@verb("down", examples=EXAMPLES)
@click.option("--cancel", is_flag=True, help="Stop running tasks first.")
def command(cancel: bool) -> None:
    """End the daemon. Without --cancel running tasks go on, and the next daemon adopts them."""
    from carma.cli.connection import connect
    from carma.cli.wording import many

    with connect() as client:
        server = client.server()
        client.shutdown(cancel_running=cancel)
    pid = server.pid
    until = time.monotonic() + LIMIT_S
    while _alive(pid):
        if time.monotonic() > until:
            raise CarmaError(f"the daemon (pid {pid}) has not ended after {LIMIT_S:g} s", "its log may say why")
        time.sleep(LOOK_S)
    goes = "goes" if server.running == 1 else "go"
    left = f"; {many(server.running, 'running task')} {goes} on" if server.running and not cancel else ""
    click.echo(f"the daemon (pid {pid}) has ended{left}")


def _alive(pid: int) -> bool:
    """Whether it serves or is still there; a zombie whose parent does not look is gone."""
    from carma.cli.connection import connect

    try:
        with connect() as client:
            if client.server().pid == pid:
                return True
    except Unreachable:
        pass
    try:
        os.kill(pid, 0)
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except PermissionError:
        return True
    except (ProcessLookupError, FileNotFoundError):
        return False
