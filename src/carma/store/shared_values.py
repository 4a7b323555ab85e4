"""Environments and long commands of tasks: stored once, and one object in memory for all tasks with the same value.

The tasks of an array share their environment and command, and so do most tasks that one shell submits. A row of the
database holds a reference instead of the value; the value is a row of the table `parts`, named by its digest. A
reference is a value that no task can have: an environment whose only variable has an empty name, or a command whose
first word is empty. Values of at most `INLINE_BYTES` stay in the row.

The registry holds the values of tasks that are not finished. `keep_only` drops the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import TypeVar, cast

from msgspec.structs import replace

from carma.core.model.events import Durable, TaskRestored, TaskSubmitted
from carma.core.model.task import Task
from carma.core.model.values import TaskSpec
from carma.store import codec

Value = dict[str, str] | tuple[str, ...]
V = TypeVar("V", dict[str, str], tuple[str, ...])
ReadPart = Callable[[str], Value]  # by digest

INLINE_BYTES = 128  # a reference takes 40
_DIGEST_BYTES = 16


class Part:
    """A value with its digest. `stored` tells whether the table has it, `sequence` which event used it last."""

    __slots__ = ("digest", "sequence", "stored", "value")

    def __init__(self, digest: str, value: Value, *, stored: bool) -> None:
        self.digest = digest
        self.value = value
        self.stored = stored
        self.sequence = 0


class Parts:
    """The values that stored tasks use. Only the writer's thread changes it; any thread may call `shared`."""

    def __init__(self) -> None:
        self._by_object: dict[int, tuple[Value, Part]] = {}  # by id(value), which is valid while the value is held
        self._by_digest: dict[str, Part] = {}

    def __contains__(self, digest: str) -> bool:
        return digest in self._by_digest

    def shared(self, spec: TaskSpec) -> TaskSpec:
        """The same spec with the objects of stored tasks, if there are any with the same environment or command."""
        environment, command = self._same(spec.environment), self._same(spec.command)
        if environment is spec.environment and command is spec.command:
            return spec
        return replace(spec, environment=environment, command=command)

    def _same(self, value: V) -> V:
        if is_short(value):
            return value
        known = self._by_digest.get(digest_of(codec.write(value)))
        return value if known is None else cast(V, known.value)

    # Writing.

    def pack(self, spec: TaskSpec, used: dict[str, Part]) -> TaskSpec:
        """The spec with references in place of long values. The parts it refers to are added to `used`."""
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

    def pack_task(self, task: Task, used: dict[str, Part]) -> Task:
        spec = self.pack(task.spec, used)
        return task if spec is task.spec else replace(task, spec=spec)

    def pack_event(self, event: Durable, used: dict[str, Part]) -> Durable:
        if isinstance(event, TaskSubmitted):
            return replace(event, spec=self.pack(event.spec, used))
        if isinstance(event, TaskRestored):
            return replace(event, task=self.pack_task(event.task, used))
        return event

    def _part_of(self, value: Value) -> Part | None:
        known = self._by_object.get(id(value))
        if known is not None:
            return known[1]
        if is_short(value):
            return None
        digest = digest_of(codec.write(value))
        part = self._by_digest.get(digest)
        if part is None:
            part = self._by_digest[digest] = Part(digest, value, stored=False)
        self._by_object[id(value)] = (value, part)
        return part

    # Reading.

    def unpack(self, spec: TaskSpec, read: ReadPart) -> TaskSpec:
        """The spec with values in place of references; values of unfinished tasks are the objects they hold."""
        environment, command = reference(spec.environment), reference(spec.command)
        if environment is None and command is None:
            return spec
        return replace(
            spec,
            environment=spec.environment if environment is None else self._value(environment, read),
            command=spec.command if command is None else self._value(command, read),
        )

    def unpack_task(self, task: Task, read: ReadPart) -> Task:
        spec = self.unpack(task.spec, read)
        return task if spec is task.spec else replace(task, spec=spec)

    def unpack_event(self, event: Durable, read: ReadPart) -> Durable:
        if isinstance(event, TaskSubmitted):
            return replace(event, spec=self.unpack(event.spec, read))
        if isinstance(event, TaskRestored):
            return replace(event, task=self.unpack_task(event.task, read))
        return event

    def _value(self, digest: str, read: ReadPart) -> Value:
        known = self._by_digest.get(digest)
        return known.value if known is not None else read(digest)

    # Life of the registry.

    def add_stored(self, digest: str, value: Value, sequence: int) -> None:
        """A part of an unfinished task, as the table has it; `sequence` is that of the newest event."""
        part = self._by_digest[digest] = Part(digest, value, stored=True)
        part.sequence = sequence
        self._by_object[id(value)] = (value, part)

    def keep_only(self, tasks: Iterable[Task], sequence: int) -> None:
        """Drop the parts that none of these tasks uses and that no event after `sequence` used."""
        kept = {digest: part for digest, part in self._by_digest.items() if part.sequence > sequence}
        by_object = {id(part.value): (part.value, part) for part in kept.values()}
        for task in tasks:
            for value in (task.spec.environment, task.spec.command):
                part = self._part_of(value)
                if part is not None:
                    kept[part.digest] = part
                    by_object[id(value)] = (value, part)
        self._by_digest, self._by_object = kept, by_object


def reference(value: Value) -> str | None:
    """The digest that stands for a value; None if the value stands for itself."""
    if isinstance(value, dict):
        return value.get("")
    return value[1] if len(value) == 2 and value[0] == "" else None


def is_short(value: Value) -> bool:
    """Whether it stays in the row. A value that looks like a reference never does."""
    if isinstance(value, dict):
        return "" not in value and sum(map(len, value)) + sum(map(len, value.values())) <= INLINE_BYTES
    return value[:1] != ("",) and sum(map(len, value)) <= INLINE_BYTES


def digest_of(body: str) -> str:
    return blake2b(body.encode(), digest_size=_DIGEST_BYTES).hexdigest()
