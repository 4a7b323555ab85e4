"""Requests and answers of API version 1. Fields are added, never renamed. Times are seconds since the epoch, UTC."""

from __future__ import annotations

from typing import Any

import msgspec

from carma.core.model.values import Activity, ActivitySource, EstimateFigures, TaskSpec

# An outcome is the tagged object of core/model/outcome.py; its tag is `kind`.
Outcome = dict[str, Any]


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Unknown fields are refused, so that a typing mistake is not a silent default."""


class Answer(msgspec.Struct, frozen=True):
    """Unknown fields are ignored, so that an older client reads a newer daemon."""


class ArrayAsk(Request, frozen=True):
    indices: tuple[int, ...]
    at_once: int | None = None


class SubmitRequest(Request, frozen=True, kw_only=True):
    spec: TaskSpec
    array: ArrayAsk | None = None
    held: bool = False
    nonblock: bool = False  # refuse (no_capacity) instead of queueing
    dry_run: bool = False  # report the decision without submitting


class SubmitAnswer(Answer, frozen=True, kw_only=True):
    ids: tuple[int, ...]  # empty for a dry run
    note: str = ""  # "would start on GPU 2 now", "waits: needs 12.4 GiB; most free is 9.1 GiB on GPU 2"
    explain: tuple[ExplainEntry, ...] = ()  # for a dry run


class CancelRequest(Request, frozen=True, kw_only=True):
    signal: int = 15
    reason: str = ""


class RetryRequest(Request, frozen=True, kw_only=True):
    fresh: bool = False  # discard the plan of recovery


class PreemptRequest(Request, frozen=True, kw_only=True):
    hold: bool = False  # hold the task when it returns to the queue
    reason: str = ""


class PauseRequest(Request, frozen=True, kw_only=True):
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
    cancel_running: bool = False  # False: running tasks go on, and the next daemon adopts them


class EstimateView(EstimateFigures, Answer, frozen=True, kw_only=True, forbid_unknown_fields=False):
    demand: dict[str, float] = {}  # expected activity alone, each 0 to 1; empty: unknown


class ActivityView(Activity, Answer, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """How busy an attempt kept its GPUs, by its own share: 0 to 1; None where it is not measured."""


class GuardView(Answer, frozen=True, kw_only=True):
    """One guard that keeps an attempt within `limit_mib` on each of its GPUs."""

    rung: str  # mps, cgroup, framework, watchdog
    limit_mib: int
    how: str = ""


class ProgressView(Answer, frozen=True, kw_only=True):
    """Optimizer steps of an attempt; rates are per second. A running attempt has its rate now, an ended one its mean.

    `slowdown` is time taken / time alone, for the same command. It is `inferred` from activity where steps or the rate
    alone are unknown.
    """

    steps: int | None = None  # None: not counted
    steps_per_s: float | None = None
    alone_steps_per_s: float | None = None
    last_step_at: float | None = None  # of a running attempt
    slowdown: float | None = None
    inferred: bool = False


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
    used_mib: int | None = None  # held now on the GPU where it holds most; None: it does not run, or unknown
    energy_j: float | None = None
    outcome: Outcome | None = None
    blame: str | None = None
    stdout: str = ""
    stderr: str = ""
    cap_mib: int | None = None  # memory limit per GPU; None: no limit
    mechanism: str | None = None  # timeslice, mps or mig; None: unknown
    guards: tuple[GuardView, ...] = ()  # strictest first
    note: str = ""  # why the preferred mechanism or guard is not used
    activity: ActivityView | None = None
    activity_inferred: bool = False  # while it runs: whether one of its GPUs shows no measured activity
    placed_mib: int | None = None  # first booking, if the booking has shrunk since
    used_s: float | None = None  # GPU-seconds since its first use, over which `activity` is the mean; None: unknown
    progress: ProgressView = ProgressView()
    paused_s: float = 0.0  # in all pauses; not part of the run time


class TaskView(Answer, frozen=True, kw_only=True):
    """A task, for all read commands."""

    id: int
    name: str
    user: str
    uid: int
    state: str  # estimating, queued, starting, running, recovering, finished
    code: str  # PD, H, R, S (paused), CG, CD, F, OOM, CA, TO, LO, DI, NF: similar to Slurm
    outcome: Outcome | None
    reason: str  # why it waits or how it ended; "" while it runs
    reason_code: str = ""
    reason_short: str = ""  # the reason of a wait in at most 40 characters
    command: tuple[str, ...]
    directory: str
    gpus: tuple[str, ...]  # UUIDs of the GPUs of its newest attempt
    gpu_indices: tuple[int, ...] = ()
    gpus_wanted: int = 1
    gpu_memory_mib: int | None = None  # declared
    exclusive: bool = False
    priority: int = 0
    held: bool = False
    estimate: EstimateView | None = None
    booking_mib: int | None = None
    needs_mib: int | None = None  # memory per GPU for the next attempt of a waiting task
    observed_mib: int | None = None
    used_mib: int | None = None  # as in its newest attempt
    attempts: tuple[AttemptView, ...] = ()
    submitted_at: float = 0.0
    retried_at: float | None = None  # the last retry by a user
    started_at: float | None = None
    ended_at: float | None = None
    begin_at: float | None = None
    reserved_start_at: float | None = None  # None also where the start rests on an assumption; `reason` names it
    time_limit_s: float | None = None
    after: tuple[str, ...] = ()  # "ok:12"
    array: str | None = None  # "40[3]"
    comment: str = ""
    exit_code: int | None = None
    mechanism: str | None = None  # of its newest attempt
    mechanism_asked: str | None = None  # requested at submission; None: that of the server
    threads_percent: int | None = None  # share of the SMs under MPS; None: all
    energy_j: float | None = None  # of all attempts, above idle
    waited_s: float | None = None  # queued, held and between attempts so far; None: from an older daemon
    sm_active: float | None = None  # the newest attempt's share of SM activity
    checkpoint_signal: int | None = None  # signal on which it saves and ends; None: it cannot save on request
    checkpoint_grace_s: float | None = None  # time for saving
    idle_since: float | None = None  # of an idle holder: when it last used the SMs
    asked_to_save_at: float | None = None  # of a running task: time of the preemption request
    paused_at: float | None = None  # None: it is not paused
    ran_s: float | None = None  # run time of its newest attempt so far, without pauses; None: it never started
    progress: ProgressView = ProgressView()  # of its newest attempt
    advice: str = ""  # of a finished task: one sentence, if its figures support one


class ExplainEntry(Answer, frozen=True, kw_only=True):
    """One GPU's part of a decision. The policy ranks by `score`; the largest is chosen first."""

    gpu: str
    index: int
    accepted: bool
    reason: str
    code: str = ""
    score: float | None = None
    parts: dict[str, float] = {}
    chosen: bool = False
    activity_source: ActivitySource = "none"  # of the GPU now


class Explanation(Answer, frozen=True, kw_only=True):
    task: int
    policy: str
    state: str
    reason: str
    entries: tuple[ExplainEntry, ...]
    needs_mib: int | None = None
    needs_source: str = ""
    reserved_start_at: float | None = None
    attempt: int | None = None  # attempt of this decision; None: the decision that would be taken now
    decision: str = ""  # the decision in one sentence; `reason` is how a finished task ended


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
    idle_tasks: tuple[int, ...] = ()  # of these, idle holders
    foreign: tuple[ForeignView, ...] = ()
    risk: dict[str, float] = {}  # the gate's summary of each metric
    gpu_util: float | None = None
    power_w: float | None = None
    energy_j: float | None = None
    idle_w: float | None = None  # measured idle power
    metrics: str = ""  # source of activity: gpm, dcgm, inferred, processes, nvml (coarse utilisation only), virtual
    # inferred: from power and utilisation; the activity is then the expected one, and `risk` is of its bound
    activity_source: ActivitySource = "none"
    drained: bool = False
    progress: dict[int, ProgressView] = {}  # of each task on it
    paused: tuple[int, ...] = ()  # those of the tasks that are paused


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
    mechanism: str = ""  # sharing.mechanism: auto, timeslice, mps, mig


class SettingView(Answer, frozen=True, kw_only=True):
    name: str
    value: Any
    origin: str
    description: str = ""


class StoryLine(Answer, frozen=True, kw_only=True):
    """One event of a task, as a sentence."""

    at: float
    event: str
    text: str


class StreamEvent(Answer, frozen=True, kw_only=True):
    """One server-sent event: a task or a GPU changed."""

    sequence: int
    at: float
    event: str  # name of the durable event
    task: int | None = None
    text: str = ""


class Done(Answer, frozen=True, kw_only=True):
    """The answer to a request that changes something."""

    note: str


class Problem(Answer, frozen=True, kw_only=True):
    """The answer to a failed request."""

    code: str
    message: str
    hint: str = ""
