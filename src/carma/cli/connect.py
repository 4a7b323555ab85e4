"""The way to the daemon of this home."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from carma.client import Client


def connect() -> Client:
    """A client on this user's socket; nothing is sent yet."""
    from carma.client import Client
    from carma.paths import find_socket

    return Client(find_socket(os.environ))
