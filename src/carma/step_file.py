"""The file in which the processes of one attempt count their optimizer steps.

1. The format: slots of `SLOT_BYTES`, one for each process that has made a step. A process takes its slot by appending
   it, then rewrites it. `launch/hook/sitecustomize.py` writes the same format without this module, because the
   interpreter of a task has no CARMA.
2. `SlotWriter` writes the slot of a process of CARMA's own (a virtual task).
3. `count` adds up the slots of an attempt.

The user of the task owns the file. A reader treats the content as untrusted: any number, a file of any size. Nothing
maps the file: an access beyond a file that was cut short would kill the reader or the training. Standard library only:
the runner imports this module.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import NamedTuple

VARIABLE = "CARMA_STEPS_FILE"  # the path of the file, in the environment of a task
SLOT_BYTES = 64
SLOTS = 256  # later processes are not counted
LIMIT_BYTES = SLOT_BYTES * SLOTS
MAGIC = 0x3153504554534143  # "CASTEPS1"
MOST_STEPS = 1 << 48  # of one process; a larger number was not counted
FUTURE_NS = 1_000_000_000  # tolerance for a process that writes while the file is read
_WORDS = 5  # magic, pid, steps, begin of the process, last step; the rest of a slot is zero


class ProcessSteps(NamedTuple):
    """Times are nanoseconds of CLOCK_MONOTONIC, which all processes of a machine share."""

    steps: int
    began_ns: int  # start of the process
    last_ns: int  # its last step


def slot_of(pid: int, steps: int, began_ns: int, last_ns: int) -> bytes:
    words = (MAGIC, pid, steps, began_ns, last_ns)
    return b"".join(word.to_bytes(8, "little") for word in words).ljust(SLOT_BYTES, b"\0")


def count(data: bytes, now_ns: int) -> ProcessSteps | None:
    """The steps of all processes together; None without a valid slot.

    The ranks of one training make the same steps, so of processes that run at the same time the largest count holds.
    Processes that follow one another (`python a.py; python b.py`) add up. `last_ns` belongs to the count of the last
    group, so that both come from one process.
    """
    slots = sorted(_slots(data, now_ns), key=lambda slot: slot.began_ns)
    total, largest, ends_ns = 0, None, 0
    for slot in slots:
        if largest is None or slot.began_ns > ends_ns:
            total += largest.steps if largest is not None else 0
            largest = slot
        elif (slot.steps, -slot.last_ns) > (largest.steps, -largest.last_ns):
            largest = slot
        ends_ns = max(ends_ns, slot.last_ns)
    if largest is None:
        return None
    return ProcessSteps(total + largest.steps, slots[0].began_ns, min(largest.last_ns, now_ns))


def _slots(data: bytes, now_ns: int) -> Iterator[ProcessSteps]:
    for at in range(0, min(len(data), LIMIT_BYTES) - SLOT_BYTES + 1, SLOT_BYTES):
        words = [int.from_bytes(data[at + 8 * word : at + 8 * word + 8], "little") for word in range(_WORDS)]
        magic, _pid, steps, began_ns, last_ns = words
        if magic == MAGIC and 0 < steps < MOST_STEPS and 0 < began_ns <= last_ns <= now_ns + FUTURE_NS:
            yield ProcessSteps(steps, began_ns, last_ns)


class SlotWriter:
    """The slot of this process in the file that the environment names. An error ends the counting, nothing else."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._offset: int | None = None
        self._began_ns = time.monotonic_ns()

    def write(self, steps: int, last_ns: int) -> None:
        if not self._path or steps <= 0:
            return
        slot = slot_of(os.getpid(), steps, self._began_ns, last_ns)
        try:
            if self._offset is None:
                self._offset = append(self._path, slot)
            else:
                _rewrite(self._path, slot, self._offset)
        except OSError:
            self._path = ""


def append(path: str, slot: bytes) -> int:
    """The position of a new slot. Raises OSError, also if the file is full or is not made of slots."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.write(fd, slot)
        offset = os.lseek(fd, 0, os.SEEK_CUR) - len(slot)
    finally:
        os.close(fd)
    if offset % SLOT_BYTES or not 0 <= offset < LIMIT_BYTES:
        raise OSError(f"{path} has no place for another process")
    return offset


def _rewrite(path: str, slot: bytes, offset: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.pwrite(fd, slot, offset)
    finally:
        os.close(fd)
