"""`carma down`: stop the daemon; running tasks continue."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import click

from carma.cli.connection import ask, connect
from carma.cli.verb import verb
from carma.client import Client
from carma.core.model.units import show_count
from carma.errors import CarmaError, Unreachable

LIMIT_S = 120.0
POLL_S = 0.05
EXAMPLES = """
carma down            running tasks continue; the next `carma up` adopts them
carma down --cancel   cancel running tasks first
"""


@verb("down", examples=EXAMPLES)
@click.option("--cancel", is_flag=True, help="Cancel running tasks first.")
def command(cancel: bool) -> None:
    """Stop the daemon and wait for its end. Running tasks continue, and the next daemon adopts them."""
    with connect() as client:
        server = client.server()
        client.shutdown(cancel_running=cancel)
    until = time.monotonic() + LIMIT_S
    while _is_alive(server.pid):
        if time.monotonic() > until:
            raise CarmaError(
                f"the daemon (pid {server.pid}) is still running {LIMIT_S:g} s after the request to stop",
                "read its log; `carma up --detach` prints the path",
            )
        time.sleep(POLL_S)
    continues = "continues" if server.running == 1 else "continue"
    left = f"; {show_count(server.running, 'running task')} {continues}" if server.running and not cancel else ""
    click.echo(f"the daemon (pid {server.pid}) has stopped{left}")


def _is_alive(pid: int) -> bool:
    """Whether the daemon serves or its process exists. A zombie does not count."""
    with contextlib.suppress(Unreachable):
        if ask(Client.server).pid == pid:
            return True
    try:
        os.kill(pid, 0)
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except PermissionError:
        return True
    except (ProcessLookupError, FileNotFoundError):
        return False
