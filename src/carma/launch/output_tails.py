"""The end of output files that the submitter named, read by the runner through descriptors of the submitter's.

Standard library only: the runner imports this module.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time

from carma.launch import attempt_records as records

LIMIT_S = 10.0  # for reading
TAIL_BYTES = 64 * 1024  # of each file; launch/attempt_files.py reads as much of CARMA's own logs


def read_tails(readers: dict[str, tuple[int, int]]) -> dict[str, str]:
    """The end of each output file that the submitter named, as far as this attempt wrote it. Read in a process of its
    own: the file system may have stopped answering."""
    if not readers:
        return {}
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            tails = {f"{name}_tail": read_tail(fd, start) for name, (fd, start) in readers.items()}
            records.write_all(writing, json.dumps(tails).encode("ascii"))
        finally:
            os._exit(0)
    os.close(writing)
    data, deadline_s = b"", time.monotonic() + LIMIT_S
    poller = select.poll()
    poller.register(reading, select.POLLIN)
    while poller.poll(max(0.0, deadline_s - time.monotonic()) * 1000) and (piece := os.read(reading, 1 << 16)):
        data += piece
    os.kill(pid, signal.SIGKILL)
    os.close(reading)
    try:
        tails = json.loads(data)
    except ValueError:
        return {}
    return tails if isinstance(tails, dict) else {}


def read_tail(fd: int, start: int) -> str:
    """What was in the file before `start` is not of this attempt."""
    size = os.fstat(fd).st_size
    begin = max(start if start <= size else 0, size - TAIL_BYTES)
    return os.pread(fd, size - begin, begin).decode("utf-8", "replace")
