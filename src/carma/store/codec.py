"""How values are written into rows: JSON by msgspec, strict both ways.

What would not read back is refused before it is stored, because one unreadable event would block every later start.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from carma.core.model.events import Durable, GpuDrained, GpuResumed, GpusFound, TaskRestored, UseNoted
from carma.core.model.task import Task
from carma.core.model.values import TaskId
from carma.core.ports import Checkpoint, PastRun
from carma.errors import StoreError

_encode = msgspec.json.Encoder().encode
_event: msgspec.json.Decoder[Durable] = msgspec.json.Decoder(Durable)
_events: msgspec.json.Decoder[tuple[Durable, ...]] = msgspec.json.Decoder(tuple[Durable, ...])
_task = msgspec.json.Decoder(Task)
_checkpoint = msgspec.json.Decoder(Checkpoint)
_run = msgspec.json.Decoder(PastRun)
_part: msgspec.json.Decoder[dict[str, str] | tuple[str, ...]] = msgspec.json.Decoder(dict[str, str] | tuple[str, ...])


def write(value: msgspec.Struct | dict[str, str] | tuple[str, ...]) -> str:
    """JSON text. Raises StoreError for lone surrogates, which JSON does not have."""
    try:
        return _encode(value).decode()
    except (UnicodeError, TypeError, ValueError) as error:
        raise _unstorable(value, error) from error


def write_event(event: Durable) -> str:
    """As `write`, and read back once: NaN, for one, is written as null and could not be loaded."""
    body = write(event)
    try:
        _event.decode(body)
    except msgspec.DecodeError as error:
        raise _unstorable(event, error) from error
    return body


def read_event(body: str | bytes) -> Durable:
    return _event.decode(body)


def read_events(body: str | bytes) -> tuple[Durable, ...]:
    return _events.decode(body)


def read_task(body: str | bytes) -> Task:
    return _task.decode(body)


def read_checkpoint(body: str | bytes) -> Checkpoint:
    return _checkpoint.decode(body)


def read_run(body: str | bytes) -> PastRun:
    return _run.decode(body)


def read_part(body: str | bytes) -> dict[str, str] | tuple[str, ...]:
    """An environment or a command, as the table `parts` has it."""
    return _part.decode(body)


def task_of(event: Durable) -> TaskId | None:
    """The task an event belongs to; None for events of GPUs, and of all tasks together."""
    match event:
        case GpusFound() | GpuDrained() | GpuResumed() | UseNoted():
            return None
        case TaskRestored(task=task):
            return task.id
        case _:
            return event.task if hasattr(event, "task") else event.key.task


def digest(command: tuple[str, ...], directory: str) -> bytes:
    """Names a command in a directory, whatever its length, for an index. Nothing is dropped from the command."""
    return blake2b(_encode((command, directory)), digest_size=16).digest()


def _unstorable(value: object, error: Exception) -> StoreError:
    names: dict[type, str] = {dict: "the environment", tuple: "the command"}
    return StoreError(
        f"{names.get(type(value), type(value).__name__)} holds a value that cannot be stored: {error}",
        "Only UTF-8 text and finite numbers can be stored.",
    )
