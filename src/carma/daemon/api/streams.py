"""The two streams of the API.

1. `LogStream`: the output of a task, byte for byte, from the start or the last lines, and further as it grows, through
   all attempts. Only CARMA's own log files are read, found by the attempt's key. The daemon must never open a file that
   a user named: the command line reads it, with the rights of its caller.
2. `server_sent_events`: events as they happen. A reader that is too slow is disconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from typing import Literal, NamedTuple

import msgspec

from carma.core.model.events import Durable, task_of
from carma.core.model.status import Finished
from carma.core.model.task import Task
from carma.core.model.values import AttemptKey, TaskId, tag_of
from carma.core.state import State
from carma.daemon.shell import Shell
from carma.daemon.views.story import as_on_record, sentence
from carma.errors import NotFound, Refused
from carma.launch.attempt_files import AttemptFiles
from carma.launch.output_paths import named_outputs
from carma.wire.api_types import StreamEvent

HEARTBEAT_S = 15.0
_HEARTBEAT = b": heartbeat\n\n"
CHUNK_BYTES = 64 * 1024
POLL_S = 0.2  # between two reads while following
NEXT_ATTEMPT_POLL_S = 5.0
_TAIL_LIMIT_BYTES = 64 * 1024 * 1024  # the last lines are searched within this part of the file


def tail_offset(file: int, lines: int) -> int:
    """Offset at which the last `lines` lines begin. A last line without its end counts as one."""
    end = os.fstat(file).st_size
    if lines <= 0:
        return end
    position, wanted = end, lines
    if end and os.pread(file, 1, end - 1) != b"\n":
        wanted -= 1
    while position > 0 and end - position < _TAIL_LIMIT_BYTES:
        size = min(CHUNK_BYTES, position)
        position -= size
        block = os.pread(file, size, position)
        place = len(block)
        while (place := block.rfind(b"\n", 0, place)) >= 0:
            if wanted == 0:
                return position + place + 1
            wanted -= 1
    return position


class LogFile:
    """Reads one attempt's log file piece by piece. The file may not exist yet.

    The beginning of a file that exceeded its size limit is a hole (launch/output_files.py): reading continues behind
    it, at the line that says what was removed.
    """

    def __init__(self, number: int, open_file: Callable[[], int | None], tail: int | None) -> None:
        self.number = number  # of the attempt
        self.offset = 0  # of the next byte to read
        self._open_file = open_file
        self._tail = tail
        self._file: int | None = None

    def open(self) -> int | None:
        """The descriptor; None while there is no file. Raises Refused while the submitter holds a lease on it."""
        if self._file is None:
            try:
                self._file = self._open_file()
            except BlockingIOError as error:
                message = "the output cannot be opened: a process of its owner holds a lease on it (fcntl F_SETLEASE)"
                raise Refused(message, "end that process, or try again in a minute") from error
            if self._file is not None:
                if self._tail is not None:
                    self.offset = tail_offset(self._file, self._tail)
                self._skip_hole(self._file)
        return self._file

    def read(self) -> bytes:
        """The next piece; empty at the end, and while the file cannot be opened."""
        file = None
        with contextlib.suppress(Refused):
            file = self.open()
        if file is None:
            return b""
        self._skip_hole(file)
        piece = os.pread(file, CHUNK_BYTES, self.offset)
        self.offset += len(piece)
        return piece

    def _skip_hole(self, file: int) -> None:
        """Offset of the first byte behind a hole that begins at or before the offset."""
        try:
            data = os.lseek(file, self.offset, os.SEEK_DATA)
        except OSError:  # only a hole, the end of the file, or a file system without holes
            return
        if data > self.offset:
            block = os.pread(file, CHUNK_BYTES, data)
            self.offset = data + len(block) - len(block.lstrip(b"\0"))

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None


class LogStream(NamedTuple):
    """The bytes of one request for logs."""

    shell: Shell
    task: TaskId
    stream: Literal["stdout", "stderr"]
    attempt: int | None
    tail: int | None
    follow: bool

    def _find(self) -> Task | None:
        return self.shell.find(self.task)

    async def open_first(self) -> LogFile | None:
        """The first file, opened so that a refusal is an error answer and not a broken stream."""
        file = self._file_after(0, self.tail)
        task = self._find()
        if file is None and task is not None and self.follow:  # no attempt yet; a later refusal would break the stream
            self._refuse_named(task, AttemptKey(task.id, 1))
        if file is not None:
            await asyncio.to_thread(file.open)  # the search for the last lines may read many megabytes
        return file

    async def pieces(self, file: LogFile | None) -> AsyncIterator[bytes]:
        number = 0
        while not self.shell.released.is_set():
            if file is not None:
                number = file.number
                try:
                    async for piece in self._pieces_of(file):
                        yield piece
                finally:
                    file.close()
            if not self.follow or (self.attempt is not None and number):
                return
            file = await self._next_file(number)
            if file is None:
                return

    async def _pieces_of(self, file: LogFile) -> AsyncIterator[bytes]:
        """One attempt's output; when following, until the attempt has ended and all of it was read."""
        while True:
            complete = not self.follow or self._ended(file.number)
            while piece := await asyncio.to_thread(file.read):
                yield piece
            if complete or self.shell.released.is_set():
                return
            await self.shell.wait_for(lambda _state: self._ended(file.number), POLL_S)

    async def _next_file(self, after: int) -> LogFile | None:
        """The file of the attempt after that one; None if the task ends without another."""
        while not self.shell.released.is_set():
            file = self._file_after(after, None)
            if file is not None or self._is_over():
                return file
            await self.shell.wait_for(
                lambda _state: self._is_over() or self._number(self._find(), after) is not None, NEXT_ATTEMPT_POLL_S
            )
        return None

    def _is_over(self) -> bool:
        task = self._find()
        return task is None or isinstance(task.status, Finished)

    def _number(self, task: Task | None, after: int) -> int | None:
        """The attempt to show: the requested one; otherwise the newest at first, then those that follow."""
        numbers = [attempt.number for attempt in task.attempts] if task is not None else []
        if self.attempt is not None:
            return self.attempt if self.attempt in numbers and self.attempt > after else None
        if not after:
            return numbers[-1] if numbers else None
        return min((number for number in numbers if number > after), default=None)

    def _ended(self, number: int) -> bool:
        task = self._find()
        if task is None:
            return True
        return all(attempt.number != number or attempt.ended_at is not None for attempt in task.attempts)

    def _file_after(self, after: int, tail: int | None) -> LogFile | None:
        """The file of the attempt to show after that one. Raises NotFound if the output went to a file that the
        submitter named."""
        task = self._find()
        number = self._number(task, after)
        if task is None or number is None:
            return None
        key = AttemptKey(task.id, number)
        self._refuse_named(task, key)
        return LogFile(number, lambda: AttemptFiles(self.shell.paths.log_dir).open_log(key, self.stream), tail)

    def _refuse_named(self, task: Task, key: AttemptKey) -> None:
        """Raises NotFound if this output goes to a file that the submitter named."""
        named = named_outputs(key, task.owner, task.spec)[0 if self.stream == "stdout" else 1]
        if named is not None:
            message = f"this output is sent to {named}; the daemon does not open files that a user named"
            raise NotFound(message, f"read that file: {named}")


def encode(sequence: int, event: Durable, state: State) -> bytes:
    name = tag_of(event)
    text = sentence(as_on_record(event, state.tasks), state.gpus)
    shown = StreamEvent(sequence=sequence, at=event.at, event=name, task=task_of(event), text=text)
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (sequence, name.encode("ascii"), msgspec.json.encode(shown))


async def server_sent_events(shell: Shell) -> AsyncIterator[bytes]:
    """The body of the stream. It ends with the subscription, whose buffer is bounded.

    The first comment is sent at once, so that a client knows that it is subscribed before it does anything else.
    """
    subscription = shell.subscribe()
    try:
        yield b": subscribed\n\n"
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    sequence, event = await anext(subscription)
            except TimeoutError:
                yield _HEARTBEAT
            except StopAsyncIteration:
                return
            else:
                yield encode(sequence, event, shell.state)
    finally:
        subscription.close()
