"""Requests and answers of API version 1. Fields are added, never renamed; times are seconds since the epoch, UTC."""

from __future__ import annotations

from typing import Any

import msgspec

from carma.core.model.values import Activity, TaskSpec

# Any appears once: an outcome travels as the tagged object that core/model/outcome.py defines, read by `kind`.
Outcome = dict[str, Any]


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Unknown fields are refused: a typing mistake must not be a silent default."""


class Answer(msgspec.Struct, frozen=True):
    """Unknown fields are ignored: an older client reads a newer daemon."""


class ArrayAsk(Request, frozen=True):
    indices: tuple[int, ...]
    at_once: int | None = None


class SubmitRequest(Request, frozen=True, kw_only=True):
    spec: TaskSpec
    array: ArrayAsk | None = None
    held: bool = False
    nonblock: bool = False  # refuse (no_capacity) instead of queueing
    dry_run: bool = False  # say what would happen, do nothing


class SubmitAnswer(Answer, frozen=True, kw_only=True):
    ids: tuple[int, ...]  # empty for a dry run
    note: str = ""  # "would start on GPU 2 now", "waits: needs 12.4 GiB; most free is 9.1 GiB on GPU 2"
    explain: tuple[ExplainEntry, ...] = ()  # for a dry run


class CancelRequest(Request, frozen=True, kw_only=True):
    signal: int = 15
    reason: str = ""


class RetryRequest(Request, frozen=True, kw_only=True):
    fresh: bool = False  # forget what recovery learnt


class PreemptRequest(Request, frozen=True, kw_only=True):
    hold: bool = False  # held when it is back in the queue
    reason: str = ""


class UpdateRequest(Request, frozen=True, kw_only=True):
    name: str | None = None
    priority: int | None = None
    gpu_memory_mib: int | None = None
    time_limit_s: float | None = None
    comment: str | None = None


class DrainRequest(Request, frozen=True, kw_only=True):
    gpu: str | None = None  # UUID or index; None: the whole server
    reason: str = ""


class ShutdownRequest(Request, frozen=True, kw_only=True):
    cancel_running: bool = False  # otherwise running tasks go on and are adopted at the next start


class EstimateView(Answer, frozen=True, kw_only=True):
    footprint_mib: int
    upper_mib: int
    source: str
    seconds: float = 0.0
    level: float | None = None  # the probability with which `upper_mib` is said to hold, where one is stated
    allocated_mib: int | None = None
    reserved_mib: int | None = None
    steps_seen: int | None = None  # optimizer steps of a trial run
    rests_on: str = ""  # what was learned, and from what, where the source has learned
    gpu_model: str | None = None  # where it was measured, or what it was worked out for
    parts_mib: dict[str, int] = {}  # what the footprint is made of, where the source can tell
    runtime_s: float | None = None  # how long it is thought to run
    demand: dict[str, float] = {}  # what it is thought to keep busy alone, each 0 to 1; empty: not known
    demand_predicted: bool = False  # worked out from a trial run's layers, and not seen in a run
    warnings: tuple[str, ...] = ()


class ActivityView(Activity, Answer, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """How busy an attempt kept its GPUs, by its own share: 0 to 1; None where it is not measured."""


class GuardView(Answer, frozen=True, kw_only=True):
    """One thing that keeps an attempt within `limit_mib` on each of its GPUs."""

    rung: str  # mps, cgroup, framework, watchdog
    limit_mib: int
    how: str = ""


class AttemptView(Answer, frozen=True, kw_only=True):
    number: int
    gpus: tuple[str, ...]
    booking_mib: int
    booking_source: str
    alone: bool
    decision: str
    placed_at: float
    started_at: float | None = None
    ended_at: float | None = None
    pid: int | None = None
    observed_mib: int | None = None
    energy_j: float | None = None
    outcome: Outcome | None = None
    blame: str | None = None
    stdout: str = ""
    stderr: str = ""
    cap_mib: int | None = None  # where it is stopped on each GPU; None: nowhere
    mechanism: str | None = None  # how it shares its GPUs: timeslice, mps, mig; None: not known (yet)
    guards: tuple[GuardView, ...] = ()  # what holds it, the hardest first
    note: str = ""  # why not the mechanism, or the guard, that one would expect
    activity: ActivityView | None = None
    placed_mib: int | None = None  # what was booked at first, where the first steps have made it less
    used_s: float | None = None  # GPU-seconds since its first use, over which `activity` is the mean; None: never seen


class TaskView(Answer, frozen=True, kw_only=True):
    """A task as every read command shows it."""

    id: int
    name: str
    user: str
    uid: int
    state: str  # estimating, queued, starting, running, recovering, finished
    code: str  # PD, H, R, CG, CD, F, OOM, CA, TO, LO, DI, NF: as in other queues
    outcome: Outcome | None
    reason: str  # why it waits, how it ended, or "" while it runs
    reason_code: str = ""
    command: tuple[str, ...]
    directory: str
    gpus: tuple[str, ...]  # the GPUs of its newest attempt, by UUID
    gpu_indices: tuple[int, ...] = ()
    gpus_wanted: int = 1
    gpu_memory_mib: int | None = None  # declared
    exclusive: bool = False
    priority: int = 0
    held: bool = False
    estimate: EstimateView | None = None
    booking_mib: int | None = None
    needs_mib: int | None = None  # of a waiting task: what its next attempt asks for on each GPU
    observed_mib: int | None = None
    attempts: tuple[AttemptView, ...] = ()
    submitted_at: float = 0.0
    started_at: float | None = None
    ended_at: float | None = None
    begin_at: float | None = None
    reserved_start_at: float | None = None
    time_limit_s: float | None = None
    after: tuple[str, ...] = ()  # "ok:12"
    array: str | None = None  # "40[3]"
    comment: str = ""
    exit_code: int | None = None
    mechanism: str | None = None  # how its newest attempt shares its GPUs
    mechanism_asked: str | None = None  # by whoever submitted it; None: the server's
    threads_percent: int | None = None  # of the SMs, under MPS; None: all of them
    energy_j: float | None = None  # of all its attempts, above what the idle GPUs would have taken
    sm_active: float | None = None  # the newest attempt's own share of SM activity
    checkpoint_signal: int | None = None  # on this one it saves and ends; None: it cannot be asked to
    checkpoint_grace_s: float | None = None  # so long it has for that
    asked_to_save_at: float | None = None  # of a running task: when it was asked to save and leave
    ran_s: float | None = None  # how long its newest attempt ran, or runs so far; None: it never started


class ExplainEntry(Answer, frozen=True, kw_only=True):
    """One GPU's part of a decision. `score` is the figure the policy ranks by; larger goes first."""

    gpu: str
    index: int
    accepted: bool
    reason: str
    code: str = ""
    score: float | None = None
    parts: dict[str, float] = {}
    chosen: bool = False


class Explanation(Answer, frozen=True, kw_only=True):
    task: int
    policy: str
    state: str
    reason: str
    entries: tuple[ExplainEntry, ...]
    needs_mib: int | None = None
    needs_source: str = ""
    reserved_start_at: float | None = None
    attempt: int | None = None  # whose decision the entries are; None: the one that would be taken now
    decision: str = ""  # that decision in a sentence; `reason` tells how a finished task ended


class ForeignView(Answer, frozen=True, kw_only=True):
    pid: int
    name: str
    memory_mib: int | None


class GpuView(ActivityView, frozen=True, kw_only=True):
    """One GPU. The metrics of its activity are means over the window."""

    gpu: str  # UUID
    index: int
    name: str
    kind: str
    state: str  # idle, open, warming, closed, full, exclusive, drained, fault
    reason: str
    memory_mib: int
    used_mib: int | None
    booked_mib: int
    room_mib: int | None
    tasks: tuple[int, ...]
    foreign: tuple[ForeignView, ...] = ()
    risk: dict[str, float] = {}  # the gate's summary of each metric
    gpu_util: float | None = None
    power_w: float | None = None
    energy_j: float | None = None
    idle_w: float | None = None  # what it takes with nobody on it, as far as it was seen
    metrics: str = ""  # where activity comes from: gpm, dcgm, processes, nvml (coarse utilisation only), virtual
    drained: bool = False


class ServerView(Answer, frozen=True, kw_only=True):
    version: str
    pid: int
    user: str
    uid: int
    home: str
    policy: str
    started_at: float
    now: float
    speed: float
    drained: str | None  # the reason, or None
    gpus: int
    queued: int
    running: int
    you_are_admin: bool = False
    mechanism: str = ""  # how tasks share GPUs, as the settings say: auto, timeslice, mps, mig


class SettingView(Answer, frozen=True, kw_only=True):
    name: str
    value: Any
    origin: str
    description: str = ""


class StoryLine(Answer, frozen=True, kw_only=True):
    """One thing that happened to a task, as a sentence."""

    at: float
    event: str
    text: str


class StreamEvent(Answer, frozen=True, kw_only=True):
    """One server-sent event: a task or a GPU changed."""

    sequence: int
    at: float
    event: str  # the durable event's name
    task: int | None = None
    text: str = ""


class Done(Answer, frozen=True, kw_only=True):
    """The answer of a verb that changes something."""

    note: str


class Problem(Answer, frozen=True, kw_only=True):
    """Every error answer."""

    code: str
    message: str
    hint: str = ""
