"""A task's output, as it was written: from the start or the last lines, and on as it grows, through every attempt.

Only CARMA's own log files are read here, found by the attempt's key. A file that the submitter named is never opened by
the daemon: its owner reads it, with the owner's rights (the command line does that).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from typing import Literal, Protocol

from carma.core.model.status import Finished
from carma.core.model.task import Task
from carma.core.model.values import AttemptKey
from carma.core.state import State
from carma.errors import NotFound
from carma.launch.attempt_files import AttemptFiles
from carma.launch.output_paths import named_outputs

CHUNK = 64 * 1024
_LOOK_EVERY_S = 0.2
_TAIL_LIMIT = 64 * 1024 * 1024  # lines further back than this are not looked for
Stream = Literal["stdout", "stderr"]


class Source(Protocol):
    """The part of the shell that is needed here."""

    @property
    def state(self) -> State: ...

    async def wait_for(self, predicate: Callable[[State], bool], timeout_s: float) -> bool: ...


def tail_offset(file: int, lines: int) -> int:
    """Where the last `lines` lines begin. A last line without its end counts as one."""
    end = os.fstat(file).st_size
    if lines <= 0:
        return end
    position, wanted = end, lines
    first = True
    while position > 0 and end - position < _TAIL_LIMIT:
        size = min(CHUNK, position)
        position -= size
        block = os.pread(file, size, position)
        if first:
            first = False
            if not block.endswith(b"\n"):
                wanted -= 1
        place = len(block)
        while (place := block.rfind(b"\n", 0, place)) >= 0:
            if wanted == 0:
                return position + place + 1
            wanted -= 1
    return position


class Reader:
    """Reads one attempt's log file piece by piece; the file may not exist yet.

    The beginning of a file that passed its size limit is a hole (launch/output_files.py): reading goes on behind it,
    at the line that says what was removed.
    """

    def __init__(self, open_file: Callable[[], int | None], tail: int | None) -> None:
        self._open_file = open_file
        self._tail = tail
        self._file: int | None = None
        self._offset = 0

    @property
    def offset(self) -> int:
        """The byte at which it reads on."""
        return self._offset

    def open(self) -> bool:
        """Whether there is a file."""
        if self._file is None:
            self._file = self._open_file()
            if self._file is not None and self._tail is not None:
                self._offset = tail_offset(self._file, self._tail)
            if self._file is not None:
                self._skip_hole()
        return self._file is not None

    def read(self) -> bytes:
        """The next piece; empty at the end."""
        if not self.open():
            return b""
        assert self._file is not None
        self._skip_hole()
        piece = os.pread(self._file, CHUNK, self._offset)
        self._offset += len(piece)
        return piece

    def _skip_hole(self) -> None:
        """To the first byte behind a hole that begins before or at the offset."""
        assert self._file is not None
        try:
            data = os.lseek(self._file, self._offset, os.SEEK_DATA)
        except OSError:  # nothing but a hole, the end of the file, or a file system without holes
            return
        if data > self._offset:
            block = os.pread(self._file, CHUNK, data)
            self._offset = data + len(block) - len(block.lstrip(b"\0"))

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None


class Output:
    """The bytes of one request for logs."""

    def __init__(
        self,
        source: Source,
        files: AttemptFiles,
        find: Callable[[], Task | None],
        *,
        stream: Stream,
        attempt: int | None,
        tail: int | None,
        follow: bool,
        closing: asyncio.Event,
    ) -> None:
        self._source = source
        self._files = files
        self._find = find
        self._stream = stream
        self._attempt = attempt
        self._tail = tail
        self._follow = follow
        self._closing = closing

    async def first(self) -> Reader | None:
        """The reader to begin with, opened so that a refusal is an error answer and not a broken stream."""
        task = self._find()
        number = self._number(task, after=0)
        if task is None or number is None:
            return None
        reader = self._reader(task, number, self._tail)
        await asyncio.to_thread(reader.open)  # looking for the last lines may read many megabytes
        return reader

    async def pieces(self, reader: Reader | None) -> AsyncIterator[bytes]:
        task = self._find()
        number = self._number(task, after=0) if reader is not None else None
        while task is not None and not self._closing.is_set():
            if reader is not None and number is not None:
                try:
                    async for piece in self._one(reader, number):
                        yield piece
                finally:
                    reader.close()
            if not self._follow or (self._attempt is not None and number is not None):
                return
            number = await self._next_number(number or 0)
            task = self._find()
            if number is None or task is None:
                return
            reader = self._reader(task, number, None)

    async def _one(self, reader: Reader, number: int) -> AsyncIterator[bytes]:
        """One attempt's output; when following, until it has ended and all of it was read."""
        while True:
            over = not self._follow or self._ended(number)
            while piece := await asyncio.to_thread(reader.read):
                yield piece
            if over or self._closing.is_set():
                return
            await self._source.wait_for(lambda _state: self._ended(number), _LOOK_EVERY_S)

    async def _next_number(self, after: int) -> int | None:
        """The attempt after that one; None when the task is over without another."""
        while not self._closing.is_set():
            task = self._find()
            number = self._number(task, after)
            if number is not None:
                return number
            if task is None or isinstance(task.status, Finished):
                return None
            await self._source.wait_for(lambda _state: self._moved(after), 5.0)
        return None

    def _moved(self, after: int) -> bool:
        task = self._find()
        return task is None or isinstance(task.status, Finished) or self._number(task, after) is not None

    def _number(self, task: Task | None, after: int) -> int | None:
        """Which attempt to show: the one asked for, the newest at first, then those that follow."""
        numbers = [attempt.number for attempt in task.attempts] if task is not None else []
        if self._attempt is not None:
            return self._attempt if self._attempt in numbers and self._attempt > after else None
        if not after:
            return numbers[-1] if numbers else None
        return min((number for number in numbers if number > after), default=None)

    def _ended(self, number: int) -> bool:
        task = self._find()
        if task is None:
            return True
        return all(attempt.number != number or attempt.ended_at is not None for attempt in task.attempts)

    def _reader(self, task: Task, number: int, tail: int | None) -> Reader:
        """Raises NotFound if the output went to a file that the submitter named."""
        key = AttemptKey(task.id, number)
        named = named_outputs(key, task.owner, task.spec)[0 if self._stream == "stdout" else 1]
        if named is not None:
            message = f"this output was sent to {named}; the daemon does not open files that a user named"
            raise NotFound(message, f"read it there: {named}")
        return Reader(lambda: self._files.open_log(key, self._stream), tail)
