"""Functions for processes that are forked from a parent that has imported torch: their answers, ends and errors.

Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

PR_SET_PDEATHSIG = 1  # prctl(2): the signal that a process gets when its parent ends
LIBC = ctypes.CDLL(None)
ERROR_CHARS = 400
# What libraries print, besides torch's own error, if they run out of memory.
OOM_SIGNS = ("out of memory", "outofmemory", "alloc_failed", "memory_allocation", "memoryallocation")
# Errors that may result from a full GPU: the run is repeated alone.
GPU_SIGNS = ("cuda", "cudnn", "cublas", "unable to find an engine")


def end_with(parent: int, number: signal.Signals) -> None:
    """Lets the kernel send the signal to this process when its parent ends for any reason. If the parent has already
    ended, this process exits at once."""
    LIBC.prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


@contextlib.contextmanager
def handled(number: signal.Signals, handler: Any) -> Iterator[None]:
    """Sets the handler of a signal inside the block. Only the main thread can do that; in another thread the block runs
    without it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def discard_output() -> None:
    """Redirects stdout and stderr of this process to /dev/null, including the output of C libraries."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def answer_in_fork(ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Calls `ask` in a forked process and returns its result, so that CUDA is not initialised in this process."""
    reader, writer = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            end_with(parent, signal.SIGKILL)
            os.close(reader)
            try:
                answer = ask()
            except Exception as error:
                answer = {"gpu": None, "error": f"{type(error).__name__}: {error}"}
            os.write(writer, json.dumps(answer).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return (
        dict(json.loads(text))
        if text
        else {"gpu": None, "error": "the process that reads the GPU ended without an answer"}
    )


def ended_by(status: int) -> str:
    """A sentence about the end of a process that has written no row; `status` is that of waitpid."""
    if os.WIFSIGNALED(status):
        return f"the process was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"the process ended with status {os.WEXITSTATUS(status)} and no row"


def failure(error: BaseException) -> dict[str, Any]:
    """The fields of a failed run. `again`: other processes on the GPU may be the cause."""
    text = f"{type(error).__name__}: {error}".strip()
    lower = text.lower()
    oom = any(sign in lower for sign in OOM_SIGNS)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" [{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}]" if frames else ""
    return {
        "oom": oom,
        "error": None if oom else " ".join(text.split())[:ERROR_CHARS] + place,
        "again": oom or any(sign in lower for sign in GPU_SIGNS),
    }
