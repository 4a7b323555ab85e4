"""What changes something: submit, cancel, hold, release, retry, preempt, update, drain, resume.

Each looks at the state inside `change`, in the same step in which its events are committed, so that two verbs on one
task cannot pass each other. An event that cannot follow what happened before is never emitted from here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import assert_never

from msgspec.structs import replace

from carma.core import preemption as preempt
from carma.core.model import events as e
from carma.core.model.outcome import Cancelled, describe
from carma.core.model.status import (
    Ended,
    Estimating,
    Finished,
    Pending,
    Queued,
    Recovering,
    Running,
    Starting,
    state_name,
)
from carma.core.model.task import Task
from carma.core.model.units import show_s
from carma.core.model.values import Estimate, GpuId, Owner, TaskId, TaskSpec
from carma.core.state import SERVER, State
from carma.daemon.api import submission_checks as admission
from carma.daemon.auth import Identity
from carma.daemon.engine import Engine, find, look_up, look_up_own, no_such
from carma.daemon.http.request import Call
from carma.daemon.probes.command_check import check_runnable
from carma.daemon.views.explanation import explain_entries
from carma.daemon.views.task_story import booked
from carma.daemon.views.user_views import Submitting, check_quota
from carma.errors import NotFound, Usage, WrongState
from carma.wire import api_types as t

_SIGKILL = 9

FileCheck = Callable[[TaskSpec, Owner], Awaitable[None]]  # raises NotRunnable or Busy


async def check_in_process(spec: TaskSpec, _owner: Owner) -> None:
    """With the credentials of this process. The daemon uses Probes.check_runnable instead."""
    check_runnable(spec)


class Verbs:
    def __init__(self, engine: Engine, check_files: FileCheck = check_in_process) -> None:
        self._engine = engine
        self._check_files = check_files
        self._submitting = Submitting()

    async def submit(self, call: Call) -> t.SubmitAnswer:
        request: t.SubmitRequest = call.body
        engine, who = self._engine, call.who
        spec = engine.shared(admission.check_spec(request.spec, who, engine.clock.now()))
        indices = admission.places(request)
        admission.check_fits(engine.state, spec)
        count = 1 if indices is None else len(indices)
        check_quota(engine.state, who.owner, spec, count)
        sharing = admission.sharing_note(engine.state, spec)
        await self._check_files(spec, who.owner)
        asks_now = request.dry_run or request.nonblock
        estimate = await engine.estimate(who.owner, spec) if asks_now else None
        find_task = await self._finder(spec)
        if request.dry_run:
            foretold = self._foretell(request, admission.resolve_dependencies(spec, find_task), who, estimate)
            return replace(foretold, note=f"{foretold.note}; {sharing}") if sharing else foretold

        def resolved(state: State) -> TaskSpec:
            """With `nonblock` only if it could start now."""
            found = admission.resolve_dependencies(spec, find_task)
            if request.nonblock:
                now = engine.clock.now()
                admission.check_capacity(
                    state, admission.as_task(found, who, estimate, held=request.held, now=now), now
                )
            return found

        if request.nonblock:  # before an id is used up; checked again below
            resolved(engine.state)
        first = engine.new_task_ids(count)
        at_once = request.array.at_once if request.array is not None else None

        def make(state: State) -> Sequence[e.Durable]:
            now = engine.clock.now()
            admission.check_fits(state, spec)
            check_quota(state, who.owner, spec, count + self._submitting.others(who.uid, first))
            specs = admission.expand(resolved(state), first, indices, at_once)
            self._submitting.add(who.uid, first, count)
            return [
                e.TaskSubmitted(now, TaskId(task_id), who.owner, one, request.held)
                for task_id, one in enumerate(specs, start=first)
            ]

        try:
            await engine.change(make)
        finally:
            self._submitting.remove(who.uid, first)
        return t.SubmitAnswer(ids=tuple(range(first, first + count)), note=sharing)

    async def _finder(self, spec: TaskSpec) -> admission.FindTask:
        """Finds the tasks that it waits for; those in the archive are read here, in the archive's thread."""
        engine = self._engine
        archived = [one.task for one in spec.after if one.task not in engine.state.tasks]
        known: dict[TaskId, Task] = {}
        if archived:
            known = await engine.read(lambda: {task.id: task for task in engine.archive.tasks(archived)})
        # A task that was archived in the meantime is in neither: that is rare, and one row.
        return lambda task: engine.state.tasks.get(task) or known.get(task) or find(engine, task)

    def _foretell(
        self, request: t.SubmitRequest, spec: TaskSpec, who: Identity, estimate: Estimate | None
    ) -> t.SubmitAnswer:
        state, now = self._engine.state, self._engine.clock.now()
        task = admission.as_task(spec, who, estimate, held=request.held, now=now)
        decision = admission.foresee(state, task, now)
        if decision.placement is None:
            note = f"would wait: {decision.reason}"
        else:
            indices = ", ".join(str(state.gpus[gpu].index) for gpu in decision.placement.gpus)
            note = f"would start on GPU {indices} now, {booked(decision.placement.booking)}"
        return t.SubmitAnswer(ids=(), note=note, explain=explain_entries(decision, state))

    async def cancel(self, call: Call) -> t.Done:
        request: t.CancelRequest = call.body
        admission.check_range("signal", request.signal, 1, 64)
        admission.check_comment(request.reason)
        await look_up_own(self._engine, call.task, call.who, "cancel")
        note = ""

        def make(state: State) -> Sequence[e.Durable]:
            nonlocal note
            task = self._live(state, call.task)
            note = _cancel_note(task, request.signal)
            grace_s = 0.0 if request.signal == _SIGKILL else state.rules.stopping.grace_of(task.spec)
            ending = Cancelled(call.who.name, request.reason)
            return [e.StopRequested(self._engine.clock.now(), task.id, ending, grace_s, request.signal)]

        await self._engine.change(make)
        return t.Done(note=note)

    async def hold(self, call: Call) -> t.Done:
        return await self._set_held(call, held=True)

    async def release(self, call: Call) -> t.Done:
        return await self._set_held(call, held=False)

    async def _set_held(self, call: Call, *, held: bool) -> t.Done:
        verb = "hold" if held else "release"
        await look_up_own(self._engine, call.task, call.who, verb)
        note = f"task {call.task} is held" if held else f"task {call.task} may start"

        def make(state: State) -> Sequence[e.Durable]:
            task = self._live(state, call.task)
            if not isinstance(task.status, Queued | Estimating):
                raise WrongState(
                    f"task {task.id} is {state_name(task.status)}; only a waiting task can be held or released"
                )
            if task.status.held == held:
                return ()
            now = self._engine.clock.now()
            return [e.TaskHeld(now, task.id) if held else e.TaskReleased(now, task.id)]

        await self._engine.change(make)
        return t.Done(note=note)

    async def retry(self, call: Call) -> t.Done:
        request: t.RetryRequest = call.body
        await look_up_own(self._engine, call.task, call.who, "retry")

        def make(state: State) -> Sequence[e.Durable]:
            now = self._engine.clock.now()
            archived = call.task not in state.tasks
            task = self._found(call.task)
            if not isinstance(task.status, Finished):
                raise WrongState(f"task {task.id} is {state_name(task.status)}; only a finished task can be retried")
            admission.check_fits(state, task.spec)
            check_quota(state, task.owner, task.spec)
            again = e.TaskRetried(now, task.id, request.fresh)
            return [e.TaskRestored(now, task), again] if archived else [again]

        await self._engine.change(make)
        return t.Done(note=f"task {call.task} is queued again")

    async def preempt(self, call: Call) -> t.Done:
        request: t.PreemptRequest = call.body
        admission.check_comment(request.reason)
        await look_up_own(self._engine, call.task, call.who, "preempt")
        note = ""

        def make(state: State) -> Sequence[e.Durable]:
            nonlocal note
            task, now = self._live(state, call.task), self._engine.clock.now()
            note = _preempt_note(task, hold=request.hold)
            return [replace(preempt.request(task, now, call.who.name, request.reason), hold=request.hold)]

        await self._engine.change(make)
        return t.Done(note=note)

    async def update(self, call: Call) -> Task:
        """Answers with the task; whoever calls makes the view."""
        request: t.UpdateRequest = call.body
        await look_up_own(self._engine, call.task, call.who, "update")
        if request == t.UpdateRequest():
            raise Usage("nothing to change is given", "name, priority, gpu_memory_mib, time_limit_s or comment")

        def make(state: State) -> Sequence[e.Durable]:
            task = self._live(state, call.task)
            _check_update(request, task, state, call.who)
            return [
                e.TaskChanged(
                    self._engine.clock.now(),
                    task.id,
                    name=request.name,
                    priority=request.priority,
                    gpu_memory_mib=request.gpu_memory_mib,
                    time_limit_s=request.time_limit_s,
                    comment=request.comment,
                )
            ]

        await self._engine.change(make)
        return await look_up(self._engine, call.task)

    async def drain(self, call: Call) -> t.Done:
        request: t.DrainRequest = call.body
        admission.check_comment(request.reason)
        gpu = _gpu(self._engine.state, request.gpu)
        await self._engine.change(lambda _state: [e.GpuDrained(self._engine.clock.now(), gpu, request.reason)])
        return t.Done(note=f"{_named(request.gpu)} takes no new tasks; those that run go on")

    async def resume(self, call: Call) -> t.Done:
        request: t.DrainRequest = call.body
        gpu = _gpu(self._engine.state, request.gpu)
        await self._engine.change(lambda _state: [e.GpuResumed(self._engine.clock.now(), gpu)])
        return t.Done(note=_resumed(self._engine.state, request.gpu))

    def _found(self, task_id: TaskId) -> Task:
        """As it is at the moment of the commit."""
        task = find(self._engine, task_id)
        if task is None:
            raise no_such(task_id)
        return task

    def _live(self, state: State, task_id: TaskId) -> Task:
        """The task, if it has not finished."""
        task = state.tasks.get(task_id) or self._found(task_id)
        if isinstance(task.status, Finished):
            raise WrongState(f"task {task.id} is over already: {describe(task.status.outcome)}")
        return task


def _cancel_note(task: Task, signal: int) -> str:
    match task.status:
        case Starting() | Running():
            return f"task {task.id} is being stopped (signal {signal})"
        case Estimating() | Queued() | Ended() | Recovering():
            return f"task {task.id} is cancelled"
        case Finished():
            return ""
        case _:
            assert_never(task.status)


def _preempt_note(task: Task, *, hold: bool) -> str:
    """What follows; or WrongState, if it cannot be asked."""
    saves, status = task.spec.checkpoint, task.status
    if saves is None:
        raise WrongState(
            f"task {task.id} declares no signal on which it saves, so it is not asked to",
            "submit with --checkpoint-signal; `carma cancel` stops it without saving",
        )
    if not isinstance(status, Running):
        hint = f"`carma hold {task.id}` keeps it from starting" if isinstance(status, Queued | Estimating) else ""
        raise WrongState(f"task {task.id} is {state_name(status)}; only a running task can be asked to save", hint)
    if status.ending is not None:
        raise WrongState(f"task {task.id} is being stopped: {describe(status.ending)}")
    if status.preempting is not None and (status.preempting.hold or not hold):
        raise WrongState(f"task {task.id} was asked to save already", "`carma show` tells when, and by whom")
    back = "and is held" if hold else "and comes back into the queue"
    return f"task {task.id} is asked to save (signal {saves.signal}); it has {show_s(saves.grace_s)}, {back}"


def _check_update(request: t.UpdateRequest, task: Task, state: State, who: Identity) -> None:
    waiting = isinstance(task.status, Pending)
    if not waiting and (request.priority is not None or request.gpu_memory_mib is not None):
        raise WrongState(
            f"task {task.id} is {state_name(task.status)}: its priority and memory can no longer be changed",
            "name, comment and time limit can",
        )
    if request.name is not None:
        admission.check_name(request.name)
        _check_rename(task)
    if request.comment is not None:
        admission.check_comment(request.comment)
    if request.priority is not None:
        admission.check_priority(request.priority, who, before=task.spec.priority)
    admission.check_range("time_limit_s", request.time_limit_s, 0.001, admission.SECONDS)
    admission.check_range("gpu_memory_mib", request.gpu_memory_mib, 1, admission.MEMORY_MIB)
    if request.gpu_memory_mib is not None:
        admission.check_fits(state, replace(task.spec, gpu_memory_mib=request.gpu_memory_mib))


def _check_rename(task: Task) -> None:
    """The output files of an attempt are found by the task's fields: they must stay what they were at its start."""
    if task.attempts and any("%x" in (template or "") for template in (task.spec.output, task.spec.error)):
        raise WrongState(
            f"task {task.id} has started, and its name is a part of its output file's name (%x)",
            "it can only be renamed before it starts",
        )


def _gpu(state: State, name: str | None) -> GpuId | None:
    if name is None:
        return None
    for gpu in state.gpus.values():
        if name in (gpu.id, str(gpu.index)):
            return gpu.id
    raise NotFound(f"there is no GPU {name!r}", "`carma gpus` lists them, by index and UUID")


def _resumed(state: State, gpu: str | None) -> str:
    if gpu is not None:
        return f"{_named(gpu)} takes new tasks" + (" once the server is resumed" if SERVER in state.drained else "")
    still = [str(found.index) for found in state.gpus.values() if found.id in state.drained]
    if not still:
        return "the server takes new tasks"
    stay = "stays" if len(still) == 1 else "stay"
    return f"the server takes new tasks; GPU {', '.join(still)} {stay} drained (`carma resume` with a GPU lifts that)"


def _named(gpu: str | None) -> str:
    return "the server" if gpu is None else f"GPU {gpu}"
