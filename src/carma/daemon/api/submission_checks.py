"""What is checked before a submission becomes an event, so that whoever submits learns at once what cannot work.

Two parts. `check_spec` looks at the request alone; `resolve_dependencies` and `check_capacity` look at the state and
run in the same step as the commit. Whether files exist is asked in daemon/command_check.py. Nothing here changes
anything.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import chain

from msgspec.structs import replace

from carma.core.model.outcome import describe_to_others, satisfied
from carma.core.model.status import Finished, Queued
from carma.core.model.task import Task
from carma.core.model.values import ArrayPlace, Dependency, Estimate, SaveSignal, TaskId, TaskSpec
from carma.core.scheduling.decision import Decision
from carma.core.scheduling.feasibility import never_fits
from carma.core.scheduling.queue_order import not_yet, try_now
from carma.core.state import State
from carma.daemon.auth import Identity
from carma.errors import NeverFitsError, NoCapacity, NoGpus, NotAllowed, NotFound, Refused, TooLarge, Usage
from carma.wire.api_types import ArrayAsk, SubmitRequest

MIB = 1024 * 1024
COMMAND_BYTES = 1 * MIB
ENVIRONMENT_BYTES = 4 * MIB
ARRAY_BYTES = 64 * MIB  # what is held once for each task, added up over an array
DEPENDENCY_BYTES = 200  # of memory: entries in the index of who waits for whom
STRING_BYTES = 32 * os.sysconf("SC_PAGE_SIZE") - 1  # the kernel's limit for one argument or variable
NAME_CHARS, COMMENT_CHARS, PATH_BYTES = 200, 2_000, 4_096
ARRAY_TASKS, ARRAY_INDEX = 10_000, 2**31 - 1
PRIORITY, SECONDS, MEMORY_MIB, DEPENDENCIES = 10_000, 1e9, 10**9, 1_000

_NEVER_HEARD = (9, 19)  # SIGKILL, SIGSTOP

FindTask = Callable[[TaskId], Task | None]


def check_spec(spec: TaskSpec, who: Identity, now: float) -> TaskSpec:
    """The spec, tidied; or an error that names what is wrong."""
    if spec.array is not None:
        raise Usage("spec.array is set by the daemon", "ask for an array in the request's own field `array`")
    _check_strings(spec)
    check_name(spec.name)
    check_comment(spec.comment)
    if not os.path.isabs(spec.directory):
        raise Usage(f"the working directory {spec.directory!r} is not an absolute path")
    check_range("gpus", spec.gpus, 1, 1_000_000)
    check_range("gpu_memory_mib", spec.gpu_memory_mib, 1, MEMORY_MIB)
    check_range("time_limit_s", spec.time_limit_s, 0.001, SECONDS)
    check_range("grace_s", spec.grace_s, 0, 86_400)
    check_range("max_oom_retries", spec.max_oom_retries, 0, 1_000)
    check_range("umask", spec.umask, 0, 0o777)
    check_range("threads_percent", spec.threads_percent, 1, 100)
    if spec.threads_percent is not None and spec.mechanism == "timeslice":
        raise Usage("threads_percent is MPS's; with time slices it means nothing", "leave one of them out")
    check_priority(spec.priority, who)
    if spec.warn is not None:
        check_range("warn.signal", spec.warn.signal, 1, 64)
        check_range("warn.before_s", spec.warn.before_s, 0, SECONDS)
    if spec.checkpoint is not None:
        _check_checkpoint(spec.checkpoint)
    if len(spec.after) > DEPENDENCIES:
        raise TooLarge(f"it waits for {len(spec.after)} tasks; the limit is {DEPENDENCIES}")
    return replace(spec, begin_at=_begin_at(spec.begin_at, now))


def _check_checkpoint(saves: SaveSignal) -> None:
    check_range("checkpoint.signal", saves.signal, 1, 64)
    check_range("checkpoint.grace_s", saves.grace_s, 1, 86_400)
    if saves.signal in _NEVER_HEARD:
        raise Usage(f"signal {saves.signal} cannot be listened for", "USR1 is the usual one for saving")


def _begin_at(at: float | None, now: float) -> float | None:
    """A start in the past is no condition at all."""
    if at is None:
        return None
    if not math.isfinite(at) or at > now + SECONDS:
        raise Usage(
            f"the start that is asked for, {_moment(at)}, is not within the next 30 years",
            "--begin takes for example now+1hour, 16:30 or 2026-01-31T16:30; begin_at of the API is seconds since 1970",
        )
    return at if at > now else None


def _moment(at: float) -> str:
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return "after the year 9999"


def _check_strings(spec: TaskSpec) -> None:
    if not spec.command or not spec.command[0]:
        raise Usage("the command is empty", "write it after `--`: carma submit -- python train.py")
    for key in spec.environment:
        if not key or "=" in key:
            raise Usage(f"{key!r} cannot be the name of an environment variable")
    pairs = [f"{key}={value}" for key, value in spec.environment.items()]
    paths = [path for path in (spec.directory, spec.output, spec.error) if path is not None]
    for text in chain(spec.command, pairs, paths, (spec.name, spec.comment)):
        if "\0" in text:
            raise Usage(
                f"there is a NUL character in {_start_of(text)!r}", "no argument, variable, name or path may hold one"
            )
    _check_sizes(spec, pairs, paths)


def _check_sizes(spec: TaskSpec, pairs: Sequence[str], paths: Sequence[str]) -> None:
    for text in chain(spec.command, pairs):
        if len(text) > STRING_BYTES // 4 and _bytes(text) > STRING_BYTES:
            raise TooLarge(
                f"{_start_of(text)!r}... has {_bytes(text)} bytes; one argument or variable may have {STRING_BYTES}",
                "put it in a file and pass the file's name",
            )
    if (size := sum(map(_bytes, spec.command)) + len(spec.command)) > COMMAND_BYTES:
        raise TooLarge(f"the command has {size} bytes; the limit is {COMMAND_BYTES}", "put the arguments in a file")
    if (size := sum(map(_bytes, pairs)) + len(pairs)) > ENVIRONMENT_BYTES:
        raise TooLarge(f"the environment has {size} bytes; the limit is {ENVIRONMENT_BYTES}", "pass less of it")
    for path in paths:
        if _bytes(path) > PATH_BYTES:
            raise TooLarge(f"the path {_start_of(path)!r}... is longer than {PATH_BYTES} bytes")


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _start_of(text: str) -> str:
    return text[:40]


def check_name(name: str) -> None:
    if len(name) > NAME_CHARS:
        raise Usage(f"the name has {len(name)} characters; the limit is {NAME_CHARS}")
    if not name.isprintable():
        raise Usage(f"the name {name!r} holds characters that cannot be printed")


def check_comment(comment: str) -> None:
    if len(comment) > COMMENT_CHARS:
        raise TooLarge(f"the comment has {len(comment)} characters; the limit is {COMMENT_CHARS}")
    if "\0" in comment:
        raise Usage("there is a NUL character in the comment")


def check_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise Usage(f"{name} is {value}; it must be between {low:g} and {high:g}")


def check_priority(priority: int, who: Identity, before: int = 0) -> None:
    """Anybody may step back; going before others is for administrators."""
    check_range("priority", priority, -PRIORITY, PRIORITY)
    if priority > max(0, before) and not who.admin:
        raise NotAllowed(
            f"priority {priority} would put the task before others', which is for administrators",
            "0 is the usual priority, and below 0 goes after others; ask an administrator to raise it",
        )


def places(request: SubmitRequest) -> tuple[int, ...] | None:
    """The indices of the array that is asked for; None for a single task."""
    ask: ArrayAsk | None = request.array
    if ask is None:
        return None
    if not ask.indices:
        raise Usage("the array has no index", "write for example --array 0-9")
    if len(ask.indices) > ARRAY_TASKS:
        raise TooLarge(f"the array has {len(ask.indices)} tasks; the limit is {ARRAY_TASKS}", "submit it in parts")
    if len(set(ask.indices)) != len(ask.indices):
        raise Usage("an index appears twice in the array")
    for index in ask.indices:
        check_range("an array index", index, 0, ARRAY_INDEX)
    check_range("at_once", ask.at_once, 1, ARRAY_TASKS)
    if request.nonblock and len(ask.indices) > 1:
        raise Usage("an array cannot be submitted with nonblock", "submit single tasks, or let the array wait")
    repeated = len(ask.indices) * _repeated_bytes(request.spec)
    if repeated > ARRAY_BYTES:
        raise TooLarge(
            f"what the array repeats for each task (command, paths, name, comment, dependencies) has "
            f"{repeated // MIB} MiB; the limit is {ARRAY_BYTES // MIB}",
            "put long arguments in a file, wait for fewer tasks, or submit it in parts",
        )
    return ask.indices


def _repeated_bytes(spec: TaskSpec) -> int:
    """What lists, rows and indices hold for each task of an array. The environment is stored once for all of them."""
    texts = (*spec.command, spec.directory, spec.output or "", spec.error or "", spec.name, spec.comment)
    return sum(map(_bytes, texts)) + DEPENDENCY_BYTES * len(spec.after)


def expand(spec: TaskSpec, first: TaskId, indices: tuple[int, ...] | None, at_once: int | None) -> list[TaskSpec]:
    """One spec for each task; the ids are consecutive from `first`."""
    if indices is None:
        return [spec]
    return [replace(spec, array=ArrayPlace(first, index, at_once)) for index in indices]


def resolve_dependencies(spec: TaskSpec, find: FindTask) -> TaskSpec:
    """Those on finished tasks are settled now: what is fulfilled is dropped, what never can be is refused."""
    still: list[Dependency] = []
    for dependency in dict.fromkeys(spec.after):
        other = find(dependency.task)
        if other is None:
            raise NotFound(
                f"there is no task {dependency.task} to wait for", "`carma queue` and `carma history` list tasks"
            )
        if not isinstance(other.status, Finished):
            still.append(dependency)
        elif not satisfied(dependency, other.status.outcome):
            ended = describe_to_others(other.status.outcome)
            raise Refused(
                f"task {other.id} can no longer end as wanted ({dependency.when}): it {ended}",
                "submit without that dependency, or retry that task first",
            )
    return replace(spec, after=tuple(still))


def check_fits(state: State, spec: TaskSpec) -> None:
    if not state.gpus:
        raise NoGpus("this server has no GPU that could be used", "`carma gpus` and `carma doctor` say more")
    if reason := never_fits(state, spec):
        raise NeverFitsError(f"the task can never run here: {reason}", "ask for less, or use another server")


def sharing_note(state: State, spec: TaskSpec) -> str:
    """What becomes of the way of sharing that is asked for: a note where the GPUs have none, else nothing.

    Raises Refused where the settings rule it out: whoever asks for MPS has a reason, and would not find out.
    """
    server, asked = state.rules.sharing.mechanism, spec.mechanism
    if asked is None and spec.threads_percent is None:
        return ""
    wanted = "mps" if spec.threads_percent is not None else asked
    if server == "mig" or (server == "timeslice" and wanted == "mps"):
        here = "on MIG instances only" if server == "mig" else "by time slices only"
        raise Refused(
            f"tasks share GPUs {here} on this server (sharing.mechanism = {server!r}), and {_wish(spec)} asked for",
            "submit it without; an administrator can change the setting",
        )
    kinds = {gpu.kind for gpu in state.gpus.values()}
    if wanted == "mps" and "card" not in kinds:
        return f"{' and '.join(sorted(_WITHOUT_MPS[kind] for kind in kinds))} have no MPS; {_wish(spec)} without effect"
    return ""


def _wish(spec: TaskSpec) -> str:
    """`--mechanism mps is`, `--mechanism mps and --threads-percent 30 are`: as whoever submits writes it."""
    asked = [f"--mechanism {spec.mechanism}"] if spec.mechanism is not None else []
    asked += [f"--threads-percent {spec.threads_percent}"] if spec.threads_percent is not None else []
    return f"{' and '.join(asked)} {'is' if len(asked) == 1 else 'are'}"


_WITHOUT_MPS = {"virtual": "virtual GPUs", "mig": "MIG instances"}


def as_task(spec: TaskSpec, who: Identity, estimate: Estimate | None, *, held: bool, now: float) -> Task:
    """The task as it would stand in the queue, to ask what would become of it."""
    return Task(id=TaskId(0), owner=who.owner, spec=spec, submitted_at=now, status=Queued(now, held), estimate=estimate)


def foresee(state: State, task: Task, now: float) -> Decision:
    """What would happen to it now. Something that it waits for comes before any GPU."""
    decision = try_now(state, task, now)
    blocked = not_yet(task, state, now)
    if blocked is None:
        return decision
    return Decision(task.id, now, decision.policy, decision.verdicts, None, blocked.sentence, blocked.code)


def check_capacity(state: State, task: Task, now: float) -> None:
    """For `nonblock`: now or not at all."""
    decision = foresee(state, task, now)
    if decision.placement is None:
        raise NoCapacity(f"it cannot start now: {decision.reason}", "without --nonblock it waits for its turn")
