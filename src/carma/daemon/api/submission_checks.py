"""The checks of a submission, so that the submitter learns at once what cannot work. They change nothing.

1. `check_spec` and `count_tasks` check the request alone.
2. The others check it against the state; they run again in the step that commits the submission.

Files are checked in probes/command_check.py.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import chain

from msgspec.structs import replace

from carma.core.model.decision import Decision
from carma.core.model.outcome import describe_to_others, satisfied
from carma.core.model.status import Finished, Queued
from carma.core.model.task import Task
from carma.core.model.units import show_count
from carma.core.model.values import ArrayPlace, Dependency, Estimate, Owner, SaveSignal, TaskId, TaskSpec
from carma.core.scheduling.eligibility import why_not_eligible
from carma.core.scheduling.explanation import try_now
from carma.core.scheduling.quota import limits_of
from carma.core.state import State
from carma.daemon.auth import Identity
from carma.daemon.probes.notification import kind_of
from carma.errors import (
    NeverFitsError,
    NoCapacity,
    NoGpus,
    NotAllowed,
    NotFound,
    QuotaReached,
    Refused,
    TooLarge,
    Usage,
)
from carma.wire.api_types import ArrayAsk, SubmitRequest

MIB = 1024 * 1024
COMMAND_BYTES = 1 * MIB
ENVIRONMENT_BYTES = 4 * MIB
ARRAY_BYTES = 64 * MIB  # of what is stored once for each task, summed over an array
DEPENDENCY_BYTES = 200  # of memory, for its entries in the index of dependencies
STRING_BYTES = 32 * os.sysconf("SC_PAGE_SIZE") - 1  # the kernel's limit for one argument or variable
NAME_CHARS, COMMENT_CHARS, PATH_BYTES = 200, 2_000, 4_096
ARRAY_TASKS, ARRAY_INDEX = 10_000, 2**31 - 1
PRIORITY, SECONDS, MEMORY_MIB, DEPENDENCIES = 10_000, 1e9, 10**9, 1_000

_NOT_CATCHABLE = (9, 19)  # SIGKILL, SIGSTOP

_RANGES = {
    "gpus": (1, 1_000_000),
    "gpu_memory_mib": (1, MEMORY_MIB),
    "time_limit_s": (0.001, SECONDS),
    "grace_s": (0, 86_400),
    "max_oom_retries": (0, 1_000),
    "umask": (0, 0o777),
    "threads_percent": (1, 100),
}

TARGETS, TARGET_CHARS = 8, 2_000
FindTask = Callable[[TaskId], Task | None]


def check_spec(spec: TaskSpec, who: Identity, now: float) -> TaskSpec:
    """The spec, normalised. Raises an error that names the wrong field."""
    if spec.array is not None:
        raise Usage("spec.array is set by the daemon", "request an array in the field `array` of the request")
    _check_strings(spec)
    check_name(spec.name)
    check_comment(spec.comment)
    if not os.path.isabs(spec.directory):
        raise Usage(f"the working directory {spec.directory!r} is not an absolute path")
    for name, (low, high) in _RANGES.items():
        check_range(name, getattr(spec, name), low, high)
    if spec.threads_percent is not None and spec.mechanism == "timeslice":
        raise Usage("threads_percent works only under MPS, not with time slices", "leave one of them out")
    check_priority(spec.priority, who)
    if spec.warn is not None:
        check_range("warn.signal", spec.warn.signal, 1, 64)
        check_range("warn.before_s", spec.warn.before_s, 0, SECONDS)
    if spec.checkpoint is not None:
        _check_checkpoint(spec.checkpoint)
    if spec.notify is not None:
        _check_targets(spec.notify.targets)
    if len(spec.after) > DEPENDENCIES:
        raise TooLarge(f"the task waits for {len(spec.after)} tasks; the limit is {DEPENDENCIES}")
    return replace(spec, begin_at=_begin_at(spec.begin_at, now))


def _check_targets(targets: tuple[str, ...]) -> None:
    if len(targets) > TARGETS or any(len(target) > TARGET_CHARS or "\0" in target for target in targets):
        raise TooLarge(f"a task has at most {TARGETS} targets of {TARGET_CHARS} characters to notify")
    for target in targets:
        try:
            kind = kind_of(target)
            wrong = not shlex.split(target) if kind == "command" else kind == "e-mail" and "@" not in target
        except ValueError:
            wrong = True
        if wrong:
            raise Usage(f"{target!r} is no target to notify", "examples: mailto:me@example.org, 'notify-send CARMA'")
        if kind not in ("command", "e-mail", "webhook") and find_spec("apprise") is None:
            hint = "the administrator installs it: pip install apprise"
            raise Usage(f"targets such as {kind}:// need Apprise, which is not installed on this server", hint)


def _check_checkpoint(saves: SaveSignal) -> None:
    check_range("checkpoint.signal", saves.signal, 1, 64)
    check_range("checkpoint.grace_s", saves.grace_s, 1, 86_400)
    if saves.signal in _NOT_CATCHABLE:
        raise Usage(f"a program cannot catch signal {saves.signal}", "USR1 is the usual signal for saving")


def _begin_at(at: float | None, now: float) -> float | None:
    """A start in the past is no condition."""
    if at is None:
        return None
    if not math.isfinite(at) or at > now + SECONDS:
        raise Usage(
            f"the requested start, {_moment(at)}, is not within the next 30 years",
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
        raise Usage("the command is empty", "write the command after `--`: carma submit -- python train.py")
    if others := [key for key in spec.slurm or () if not key.startswith("SLURM_")]:
        raise Usage(f"spec.slurm has {others[0]!r}, which is no variable of Slurm", "put it into spec.environment")
    for key in chain(spec.environment, spec.slurm or ()):
        if not key or "=" in key:
            raise Usage(f"{key!r} cannot be the name of an environment variable")
    pairs = [f"{key}={value}" for key, value in chain(spec.environment.items(), (spec.slurm or {}).items())]
    paths = [path for path in (spec.directory, spec.output, spec.error) if path is not None]
    for text in chain(spec.command, pairs, paths, (spec.name, spec.comment)):
        if "\0" in text:
            raise Usage(
                f"{text[:40]!r} contains a NUL character", "no argument, variable, name or path may contain one"
            )
    _check_sizes(spec, pairs, paths)


def _check_sizes(spec: TaskSpec, pairs: Sequence[str], paths: Sequence[str]) -> None:
    for text in chain(spec.command, pairs):
        if len(text) > STRING_BYTES // 4 and _bytes(text) > STRING_BYTES:
            raise TooLarge(
                f"{text[:40]!r}... has {_bytes(text)} bytes; one argument or variable may have {STRING_BYTES}",
                "put the text in a file and pass the file's name",
            )
    if (size := sum(map(_bytes, spec.command)) + len(spec.command)) > COMMAND_BYTES:
        raise TooLarge(f"the command has {size} bytes; the limit is {COMMAND_BYTES}", "put the arguments in a file")
    if (size := sum(map(_bytes, pairs)) + len(pairs)) > ENVIRONMENT_BYTES:
        raise TooLarge(f"the environment has {size} bytes; the limit is {ENVIRONMENT_BYTES}", "pass fewer variables")
    for path in paths:
        if _bytes(path) > PATH_BYTES:
            raise TooLarge(f"the path {path[:40]!r}... is longer than {PATH_BYTES} bytes")


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def check_name(name: str) -> None:
    if len(name) > NAME_CHARS:
        raise Usage(f"the name has {len(name)} characters; the limit is {NAME_CHARS}")
    if not name.isprintable():
        raise Usage(f"the name {name!r} contains characters that cannot be printed")


def check_comment(comment: str) -> None:
    if len(comment) > COMMENT_CHARS:
        raise TooLarge(f"the comment has {len(comment)} characters; the limit is {COMMENT_CHARS}")
    if "\0" in comment:
        raise Usage("the comment contains a NUL character")


def check_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise Usage(f"{name} is {value}; it must be between {low:g} and {high:g}")


def check_priority(priority: int, who: Identity, before: int = 0) -> None:
    """Every user may lower a priority; only administrators may raise it above the usual one."""
    check_range("priority", priority, -PRIORITY, PRIORITY)
    if priority > max(0, before) and not who.admin:
        raise NotAllowed(
            f"priority {priority}: only administrators may raise a priority above 0",
            "0 is the usual priority; ask an administrator to raise it",
        )


def count_tasks(request: SubmitRequest) -> int:
    """The number of requested tasks: those of an array, or one."""
    ask = request.array
    if ask is None:
        return 1
    if not ask.indices:
        raise Usage("the array has no index", "an example: --array 0-9")
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
            f"command, paths, name, comment and dependencies, repeated for each task of the array, have "
            f"{repeated // MIB} MiB; the limit is {ARRAY_BYTES // MIB}",
            "put long arguments in a file, wait for fewer tasks, or submit it in parts",
        )
    return len(ask.indices)


def _repeated_bytes(spec: TaskSpec) -> int:
    """What is stored for each task of an array. The environment is stored once for all of them."""
    slurm = chain.from_iterable((spec.slurm or {}).items())
    texts = (*spec.command, spec.directory, spec.output or "", spec.error or "", spec.name, spec.comment, *slurm)
    return sum(map(_bytes, texts)) + DEPENDENCY_BYTES * len(spec.after)


def expand(spec: TaskSpec, first: TaskId, array: ArrayAsk | None) -> list[TaskSpec]:
    """One spec for each task; the ids are consecutive from `first`."""
    if array is None:
        return [spec]
    return [replace(spec, array=ArrayPlace(first, index, array.at_once)) for index in array.indices]


def resolve_dependencies(spec: TaskSpec, find: FindTask) -> TaskSpec:
    """Dependencies on finished tasks are decided now: satisfied ones are dropped, impossible ones are refused."""
    unfinished: list[Dependency] = []
    for dependency in dict.fromkeys(spec.after):
        other = find(dependency.task)
        if other is None:
            raise NotFound(
                f"there is no task {dependency.task} to wait for", "`carma queue` and `carma history` list tasks"
            )
        if not isinstance(other.status, Finished):
            unfinished.append(dependency)
        elif not satisfied(dependency, other.status.outcome):
            ended = describe_to_others(other.status.outcome)
            raise Refused(
                f"the task would wait for task {other.id} to {dependency.wanted_end}, but that task {ended}",
                "submit without that dependency, or retry that task first",
            )
    return replace(spec, after=tuple(unfinished))


def check_fits(state: State, spec: TaskSpec) -> None:
    if not state.gpus:
        raise NoGpus("this server has no usable GPU", "`carma doctor` says why")
    if reason := state.never_fits(spec):
        raise NeverFitsError(f"the task can never run here: {reason}", "ask for less, or use another server")


def sharing_note(state: State, spec: TaskSpec) -> str:
    """A note if the GPUs do not have the requested sharing mechanism, else "". Raises Refused if the settings exclude
    it: a user who requests MPS has a reason, and must not miss that it is not used."""
    server, asked = state.rules.sharing.mechanism, spec.mechanism
    if asked is None and spec.threads_percent is None:
        return ""
    wanted = "mps" if spec.threads_percent is not None else asked
    if server == "mig" or (server == "timeslice" and wanted == "mps"):
        allowed = "on MIG instances only" if server == "mig" else "by time slices only"
        raise Refused(
            f"tasks share GPUs {allowed} on this server (sharing.mechanism = {server!r}), and {_wish(spec)} requested",
            "submit without that option; an administrator can change the setting",
        )
    kinds = {gpu.kind for gpu in state.gpus.values()}
    if wanted == "mps" and "card" not in kinds:
        return f"{' and '.join(sorted(_WITHOUT_MPS[kind] for kind in kinds))} have no MPS; {_wish(spec)} without effect"
    return ""


def _wish(spec: TaskSpec) -> str:
    """`--mechanism mps is`, `--mechanism mps and --threads-percent 30 are`: as in the command line."""
    asked = [f"--mechanism {spec.mechanism}"] if spec.mechanism is not None else []
    asked += [f"--threads-percent {spec.threads_percent}"] if spec.threads_percent is not None else []
    return f"{' and '.join(asked)} {'is' if len(asked) == 1 else 'are'}"


_WITHOUT_MPS = {"virtual": "virtual GPUs", "mig": "MIG instances"}


def decide_now(
    state: State, spec: TaskSpec, who: Identity, estimate: Estimate | None, *, held: bool, now: float
) -> Decision:
    """The decision about such a task in the queue now. A condition that it waits for comes before any GPU."""
    status = Queued(now, held)
    task = Task(id=TaskId(0), owner=who.owner, spec=spec, submitted_at=now, status=status, estimate=estimate)
    decision = try_now(state, task, now)
    blocked = why_not_eligible(task, state, now)
    if blocked is None:
        return decision
    return Decision(task.id, now, decision.policy, decision.verdicts, None, blocked.sentence, blocked.code)


def check_capacity(decision: Decision) -> None:
    """Check for `nonblock`: raises NoCapacity unless the task can start now."""
    if decision.placement is None:
        raise NoCapacity(f"the task cannot start now: {decision.reason}", "without --nonblock it waits in the queue")


_ASK = "; an administrator can change the setting"


def check_quota(state: State, owner: Owner, spec: TaskSpec, count: int = 1) -> None:
    """Raises QuotaReached if `count` more tasks may not wait, or could never start."""
    limits = limits_of(state.rules.quota, owner.name)
    if limits.gpus is not None and spec.gpus > limits.gpus:
        asks = show_count(spec.gpus, "GPU")
        raise QuotaReached(
            f"the task requests {asks}, and user {owner.name} may hold {limits.gpus} at once (quota.gpus)",
            "request fewer GPUs" + _ASK,
        )
    if limits.running == 0:
        raise QuotaReached(f"user {owner.name} may run no task here (quota.running is 0)", "ask an administrator")
    if limits.waiting is None:
        return
    waiting = state.accounts.waiting(owner.uid)
    if waiting + count > limits.waiting:
        more = "" if count == 1 else f", and {count} more are submitted"
        raise QuotaReached(
            f"user {owner.name} has {waiting} of {limits.waiting} waiting tasks (quota.waiting){more}",
            "wait until some have started, or cancel some" + _ASK,
        )
