"""A task's output, as it was written: from the start or the last lines, and on as it grows, through every attempt.

Only files in the daemon's own directory are opened, and never through a link: a daemon that is root must not be led
to read what the asking user could not. Output that was sent elsewhere is read by its owner, with the owner's rights.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Literal, Protocol

from carma.core.model import AttemptKey
from carma.core.state import State
from carma.core.status import Finished
from carma.core.task import Task
from carma.errors import NotFound

CHUNK = 64 * 1024
_LOOK_EVERY_S = 0.2
_TAIL_LIMIT = 64 * 1024 * 1024  # lines further back than this are not looked for
Stream = Literal["stdout", "stderr"]


class Source(Protocol):
    """What of the shell is needed here."""

    @property
    def state(self) -> State: ...

    def log_paths(self, key: AttemptKey) -> tuple[Path, Path]: ...

    async def wait_for(self, predicate: Callable[[State], bool], timeout_s: float) -> bool: ...


def open_log(path: Path, directory: Path) -> int | None:
    """A file descriptor; None when there is nothing yet. Raises NotFound for a file that is not ours to read."""
    outside = NotFound(
        f"this output was sent to {path}, which is not in the daemon's own directory", f"read it there: {path}"
    )
    if not path.parent.resolve().is_relative_to(directory.resolve()):
        raise outside
    try:
        found = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:  # a link, or taken away from us
        raise outside from error
    about = os.fstat(found)
    if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
        os.close(found)
        raise outside
    return found


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
    """Reads one attempt's file piece by piece; the file may not be there yet."""

    def __init__(self, path: Path, directory: Path, tail: int | None) -> None:
        self._path = path
        self._directory = directory
        self._tail = tail
        self._file: int | None = None
        self._offset = 0

    @property
    def offset(self) -> int:
        """At which byte it reads on."""
        return self._offset

    def open(self) -> bool:
        """Whether there is a file."""
        if self._file is None:
            self._file = open_log(self._path, self._directory)
            if self._file is not None and self._tail is not None:
                self._offset = tail_offset(self._file, self._tail)
        return self._file is not None

    def read(self) -> bytes:
        """The next piece; empty at the end."""
        if not self.open():
            return b""
        assert self._file is not None
        piece = os.pread(self._file, CHUNK, self._offset)
        self._offset += len(piece)
        return piece

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
        directory: Path,
        find: Callable[[], Task | None],
        *,
        stream: Stream,
        attempt: int | None,
        tail: int | None,
        follow: bool,
        closing: asyncio.Event,
    ) -> None:
        self._source = source
        self._directory = directory
        self._find = find
        self._stream = stream
        self._attempt = attempt
        self._tail = tail
        self._follow = follow
        self._closing = closing

    def first(self) -> Reader | None:
        """The reader to begin with, opened so that a refusal is an error answer and not a broken stream."""
        task = self._find()
        number = self._number(task, after=0)
        if task is None or number is None:
            return None
        reader = self._reader(task, number, self._tail)
        reader.open()
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
            while piece := reader.read():
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
        stdout, stderr = self._source.log_paths(AttemptKey(task.id, number))
        return Reader(stdout if self._stream == "stdout" else stderr, self._directory, tail)
