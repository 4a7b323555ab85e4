"""The way to the daemon of this home."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from carma.client import Client


def connect(timeout_s: float | None = None) -> Client:
    """A client on this user's socket; nothing is sent yet."""
    from carma.client import Client
    from carma.paths import find_socket

    socket = find_socket(os.environ)
    return Client(socket) if timeout_s is None else Client(socket, timeout_s=timeout_s)
