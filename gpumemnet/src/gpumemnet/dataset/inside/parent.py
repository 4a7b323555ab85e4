"""Ties a process's end to its parent's: nothing goes on training on a GPU after whoever asked for it is gone."""

from __future__ import annotations

import ctypes
import os
import signal

DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG
LIBC = ctypes.CDLL(None)


def end_with(parent: int, how: signal.Signals) -> None:
    """This process gets the signal when its parent ends, however that ends; it ends at once where that has happened."""
    LIBC.prctl(DIE_WITH_PARENT, how)
    if os.getppid() != parent:
        os._exit(1)
