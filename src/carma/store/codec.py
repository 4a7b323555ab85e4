"""Rows of the database as JSON by msgspec, strict in both directions; and the registry of values that are stored once.

A value that could not be read back is refused before it is stored, because one unreadable event blocks every start.

Environments and long commands are stored once, and are one object in memory for all tasks with an equal value. The
tasks of an array share their environment and command, and so do most tasks from one shell. A row of the database has a
reference instead of the value; the value is a row of the table `parts`, with its digest as key. A reference is a value
that no task can have: an environment whose only variable has an empty name, or a command whose first word is empty.
Values of at most `INLINE_BYTES` stay in the row. The registry has the values of unfinished tasks. `keep_only` drops the
others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeVar, cast

import msgspec
from msgspec.structs import replace

from carma.core.model.events import Durable, TaskRestored, TaskSubmitted
from carma.core.model.task import Task
from carma.core.model.values import TaskSpec
from carma.core.ports import Checkpoint, PastRun
from carma.errors import StoreError

Value = dict[str, str] | tuple[str, ...]
V = TypeVar("V", dict[str, str], tuple[str, ...])
Holder = TypeVar("Holder", Task, Durable)
ReadPart = Callable[[str], Value]  # by digest

INLINE_BYTES = 128  # a reference takes 40
_DIGEST_BYTES = 16

_encode = msgspec.json.Encoder().encode
read_event: Callable[[str], Durable] = msgspec.json.Decoder(Durable).decode
read_events: Callable[[str], tuple[Durable, ...]] = msgspec.json.Decoder(tuple[Durable, ...]).decode
read_part: Callable[[str], Value] = msgspec.json.Decoder(Value).decode  # from the table `parts`
read_task = msgspec.json.Decoder(Task).decode
read_checkpoint = msgspec.json.Decoder(Checkpoint).decode
read_run = msgspec.json.Decoder(PastRun).decode


def write(value: msgspec.Struct | Value) -> str:
    """JSON text. Raises StoreError for lone surrogates, which JSON cannot hold."""
    try:
        return _encode(value).decode()
    except (UnicodeError, TypeError, ValueError) as error:
        raise _unstorable(value, error) from error


def write_event(event: Durable) -> str:
    """Writes the event and tests that it reads back: NaN, for example, would be written as null."""
    body = write(event)
    try:
        read_event(body)
    except msgspec.DecodeError as error:
        raise _unstorable(event, error) from error
    return body


def digest(command: tuple[str, ...], directory: str) -> bytes:
    """A key of fixed length for a command in a directory."""
    return blake2b(_encode((command, directory)), digest_size=16).digest()


def _unstorable(value: object, error: Exception) -> StoreError:
    names: dict[type, str] = {dict: "the environment", tuple: "the command"}
    return StoreError(
        f"{names.get(type(value), type(value).__name__)} holds a value that cannot be stored: {error}",
        "Only UTF-8 text and finite numbers can be stored.",
    )


@dataclass(slots=True, eq=False)
class SharedValue:
    """A value with its digest. `stored`: whether the table has it. `sequence`: the last event that used it."""

    digest: str
    value: Value
    stored: bool = False
    sequence: int = 0


class Parts:
    """The values of stored tasks. Only the writer's thread changes it; every thread may call `shared`."""

    def __init__(self) -> None:
        self._by_object: dict[int, tuple[Value, SharedValue]] = {}  # by id(value), valid while it is referenced here
        self._by_digest: dict[str, SharedValue] = {}

    def __contains__(self, digest: str) -> bool:
        return digest in self._by_digest

    def shared(self, spec: TaskSpec) -> TaskSpec:
        """The same spec with the environment and command objects of stored tasks where they are equal."""
        environment, command = self._same(spec.environment), self._same(spec.command)
        if environment is spec.environment and command is spec.command:
            return spec
        return replace(spec, environment=environment, command=command)

    def _same(self, value: V) -> V:
        if is_short(value):
            return value
        known = self._by_digest.get(digest_of(write(value)))
        return value if known is None else cast(V, known.value)

    # Writing.

    def pack(self, value: Holder, used: dict[str, SharedValue]) -> Holder:
        """The task or event with references in place of long values. Adds the parts that it refers to to `used`."""
        return with_spec(value, lambda spec: self._pack(spec, used))

    def _pack(self, spec: TaskSpec, used: dict[str, SharedValue]) -> TaskSpec:
        environment, command = self._part_of(spec.environment), self._part_of(spec.command)
        if environment is None and command is None:
            return spec
        for part in (environment, command):
            if part is not None:
                used[part.digest] = part
        return replace(
            spec,
            environment=spec.environment if environment is None else {"": environment.digest},
            command=spec.command if command is None else ("", command.digest),
        )

    def _part_of(self, value: Value) -> SharedValue | None:
        known = self._by_object.get(id(value))
        if known is not None:
            return known[1]
        if is_short(value):
            return None
        digest = digest_of(write(value))
        part = self._by_digest.get(digest)
        if part is None:
            part = self._by_digest[digest] = SharedValue(digest, value)
        self._by_object[id(value)] = (value, part)
        return part

    # Reading.

    def unpack(self, value: Holder, read: ReadPart) -> Holder:
        """The task or event with values in place of references; unfinished tasks share one object of each value."""
        return with_spec(value, lambda spec: self._unpack(spec, read))

    def _unpack(self, spec: TaskSpec, read: ReadPart) -> TaskSpec:
        environment, command = reference(spec.environment), reference(spec.command)
        if environment is None and command is None:
            return spec
        return replace(
            spec,
            environment=spec.environment if environment is None else self._value(environment, read),
            command=spec.command if command is None else self._value(command, read),
        )

    def _value(self, digest: str, read: ReadPart) -> Value:
        known = self._by_digest.get(digest)
        return known.value if known is not None else read(digest)

    # Life of the registry.

    def add_stored(self, digest: str, value: Value, sequence: int) -> None:
        """Register a part of an unfinished task that the table has; `sequence` is that of the newest event."""
        part = self._by_digest[digest] = SharedValue(digest, value, stored=True, sequence=sequence)
        self._by_object[id(value)] = (value, part)

    def keep_only(self, tasks: Iterable[Task], sequence: int) -> None:
        """Drop the parts that neither these tasks nor an event after `sequence` use."""
        kept = {digest: part for digest, part in self._by_digest.items() if part.sequence > sequence}
        by_object = {id(part.value): (part.value, part) for part in kept.values()}
        for task in tasks:
            for value in (task.spec.environment, task.spec.command):
                part = self._part_of(value)
                if part is not None:
                    kept[part.digest] = part
                    by_object[id(value)] = (value, part)
        self._by_digest, self._by_object = kept, by_object


def with_spec(value: Holder, change: Callable[[TaskSpec], TaskSpec]) -> Holder:
    """A task or an event with a changed spec; the same object if it has none or stays equal."""
    if isinstance(value, Task | TaskSubmitted):
        spec = change(value.spec)
        return value if spec is value.spec else replace(value, spec=spec)
    return replace(value, task=with_spec(value.task, change)) if isinstance(value, TaskRestored) else value


def reference(value: Value) -> str | None:
    """The digest in a reference; None for an ordinary value."""
    if isinstance(value, dict):
        return value.get("")
    return value[1] if len(value) == 2 and value[0] == "" else None


def is_short(value: Value) -> bool:
    """Whether a value stays in the row. A value that looks like a reference never does."""
    if isinstance(value, dict):
        return "" not in value and sum(map(len, value)) + sum(map(len, value.values())) <= INLINE_BYTES
    return value[:1] != ("",) and sum(map(len, value)) <= INLINE_BYTES


def digest_of(body: str) -> str:
    return blake2b(body.encode(), digest_size=_DIGEST_BYTES).hexdigest()
