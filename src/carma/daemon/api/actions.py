"""The routes that change something: submit, cancel, hold, release, retry, preempt, pause, unpause, update, drain,
resume.

Each checks the state inside `Shell.change`, in the same step in which its events are committed, so that two actions on
one task cannot contradict each other. An event that cannot follow the earlier ones must never be created here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from carma.core import pausing
from carma.core import preemption as preempt
from carma.core.model import events as e
from carma.core.model import status as s
from carma.core.model.decision import Decision
from carma.core.model.outcome import Cancelled, describe
from carma.core.model.task import Task
from carma.core.model.units import show_s
from carma.core.model.values import GpuId, TaskId, TaskSpec
from carma.core.state import SERVER, State
from carma.daemon.api import submission_checks as checks
from carma.daemon.api.handlers import Handlers
from carma.daemon.auth import Identity
from carma.daemon.http.request import ApiCall
from carma.daemon.shell import no_such_task
from carma.daemon.views.explanation import explain_entries
from carma.daemon.views.story import booked
from carma.errors import NotFound, StoreError, Usage, WrongState
from carma.wire import api_types as t

_SIGKILL = 9

Decide = Callable[[State, Task, float], Sequence[e.Durable]]  # of a task that has not finished, at that time


class Actions(Handlers):
    async def submit(self, call: ApiCall) -> t.SubmitAnswer:
        request: t.SubmitRequest = call.body
        shell, who = self.shell, call.who
        spec = shell.store.shared(checks.check_spec(request.spec, who, shell.clock.now()))
        count = checks.count_tasks(request)
        checks.check_fits(shell.state, spec)
        checks.check_quota(shell.state, who.owner, spec, count)
        note = checks.sharing_note(shell.state, spec)
        await self.check_files(spec, who.owner)
        immediate = request.dry_run or request.nonblock
        estimate = await self.estimates.of_unsubmitted(who.owner, spec) if immediate else None
        find_task = await self._dependency_finder(spec)

        def decide(state: State) -> Decision:
            resolved, now = checks.resolve_dependencies(spec, find_task), shell.clock.now()
            return checks.decide_now(state, resolved, who, estimate, held=request.held, now=now)

        if request.dry_run:
            return _dry_run(decide(shell.state), shell.state, note)

        def resolve(state: State) -> TaskSpec:
            if request.nonblock:
                checks.check_capacity(decide(state))
            return checks.resolve_dependencies(spec, find_task)

        if request.nonblock:  # before an id is used; checked again at the commit
            resolve(shell.state)
        ids = await self._store_submission(request, who, spec, count, resolve)
        return t.SubmitAnswer(ids=ids, note=note)

    async def _store_submission(
        self, request: t.SubmitRequest, who: Identity, spec: TaskSpec, count: int, resolve: Callable[[State], TaskSpec]
    ) -> tuple[TaskId, ...]:
        first = self.shell.store.new_task_ids(count)

        def make(state: State) -> Sequence[e.Durable]:
            now = self.shell.clock.now()
            checks.check_fits(state, spec)
            others = sum(more for other, (uid, more) in self.pending.items() if uid == who.uid and other != first)
            checks.check_quota(state, who.owner, spec, count + others)
            specs = checks.expand(resolve(state), first, request.array)
            self.pending[first] = who.uid, count
            return [
                e.TaskSubmitted(now, TaskId(task_id), who.owner, one, request.held)
                for task_id, one in enumerate(specs, start=first)
            ]

        try:
            await self.shell.change(make)
        finally:
            self.pending.pop(first, None)
        return tuple(TaskId(task_id) for task_id in range(first, first + count))

    async def _dependency_finder(self, spec: TaskSpec) -> checks.FindTask:
        """Archived dependencies are read here, in the archive's thread."""
        shell = self.shell
        archived = [one.task for one in spec.after if one.task not in shell.state.tasks]
        known: dict[TaskId, Task] = {}
        if archived:
            known = await shell.read(lambda: {task.id: task for task in shell.archive.tasks(archived)})
        # A task that was archived in the meantime is in neither; that is rare, and one row.
        return lambda task: shell.state.tasks.get(task) or known.get(task) or shell.find(task)

    async def cancel(self, call: ApiCall) -> t.Done:
        request: t.CancelRequest = call.body
        checks.check_range("signal", request.signal, 1, 64)
        checks.check_comment(request.reason)

        def decide(state: State, task: Task, now: float) -> Sequence[e.Durable]:
            grace_s = 0.0 if request.signal == _SIGKILL else state.rules.stopping.grace_of(task.spec)
            ending = Cancelled(call.who.name, request.reason)
            return [e.StopRequested(now, task.id, ending, grace_s, request.signal)]

        stopping = f"task {call.task} is being stopped (signal {request.signal})"
        try:
            task = await self._change_task(call, decide)
        except StoreError as error:
            self._stop_unstored(call.task, decide, error)
            return t.Done(note=f"{stopping}; this is recorded later: {error}")
        runs = isinstance(task.status, s.Starting | s.Running)
        return t.Done(note=stopping if runs else f"task {task.id} is cancelled")

    def _stop_unstored(self, task_id: TaskId, decide: Decide, error: StoreError) -> None:
        """Hand the stop of a running task to the loop although it cannot be stored; otherwise raise `error`."""
        shell = self.shell
        task = shell.state.tasks.get(task_id)
        if task is None or not isinstance(task.status, s.Running) or not shell.store.in_place():
            raise error
        for event in decide(shell.state, task, shell.clock.now()):
            assert isinstance(event, e.StopRequested)
            shell.unstored_stops.append((task.key, event))

    async def hold(self, call: ApiCall) -> t.Done:
        await self._set_held(call, held=True)
        return t.Done(note=f"task {call.task} is held")

    async def release(self, call: ApiCall) -> t.Done:
        await self._set_held(call, held=False)
        return t.Done(note=f"task {call.task} may start")

    async def _set_held(self, call: ApiCall, *, held: bool) -> None:
        def decide(_state: State, task: Task, now: float) -> Sequence[e.Durable]:
            if not isinstance(task.status, s.Queued | s.Estimating):
                raise WrongState(
                    f"task {task.id} is {s.state_name(task.status)}; only a waiting task can be held or released"
                )
            if task.status.held == held:
                return ()
            return [e.TaskHeld(now, task.id) if held else e.TaskReleased(now, task.id)]

        await self._change_task(call, decide)

    async def retry(self, call: ApiCall) -> t.Done:
        request: t.RetryRequest = call.body
        await self._own_task(call)

        def make(state: State) -> Sequence[e.Durable]:
            now = self.shell.clock.now()
            archived = call.task not in state.tasks
            task = self._find(call.task)
            if not isinstance(task.status, s.Finished):
                raise WrongState(f"task {task.id} is {s.state_name(task.status)}; only a finished task can be retried")
            checks.check_fits(state, task.spec)
            checks.check_quota(state, task.owner, task.spec)
            again = e.TaskRetried(now, task.id, request.fresh)
            return [e.TaskRestored(now, task), again] if archived else [again]

        await self.shell.change(make)
        return t.Done(note=f"task {call.task} is queued again")

    async def preempt(self, call: ApiCall) -> t.Done:
        request: t.PreemptRequest = call.body
        checks.check_comment(request.reason)

        def decide(_state: State, task: Task, now: float) -> Sequence[e.Durable]:
            _check_preempt(task, hold=request.hold)
            return [replace(preempt.request(task, now, call.who.name, request.reason), hold=request.hold)]

        saves = (await self._change_task(call, decide)).spec.checkpoint
        assert saves is not None
        then = "and is held" if request.hold else "and returns to the queue"
        has = f"it has {show_s(saves.grace_s)}, {then}"
        return t.Done(note=f"task {call.task} is asked to save (signal {saves.signal}); {has}")

    async def pause(self, call: ApiCall) -> t.Done:
        request: t.PauseRequest = call.body
        checks.check_comment(request.reason)

        def decide(state: State, task: Task, now: float) -> Sequence[e.Durable]:
            _check_pause(state, task)
            by_user = task.paused is not None and task.paused.by != pausing.CARMA
            return () if by_user else [e.TaskPaused(now, task.id, call.who.name, request.reason)]

        before = await self._change_task(call, decide)
        note = "" if before.spec.pause else " (--no-pause keeps only CARMA from it)"
        return t.Done(note=f"task {call.task} is paused{note}; it keeps its memory: `carma unpause` continues it")

    async def unpause(self, call: ApiCall) -> t.Done:
        def decide(_state: State, task: Task, now: float) -> Sequence[e.Durable]:
            if not isinstance(task.status, s.Running):
                raise WrongState(f"task {task.id} is {s.state_name(task.status)}; only a paused task can be continued")
            return () if task.paused is None else [e.TaskUnpaused(now, task.id, call.who.name)]

        await self._change_task(call, decide)
        return t.Done(note=f"task {call.task} continues")

    async def update(self, call: ApiCall) -> t.TaskView:
        request: t.UpdateRequest = call.body

        def decide(state: State, task: Task, now: float) -> Sequence[e.Durable]:
            if request == t.UpdateRequest():
                raise Usage("no change is given", "name, priority, gpu_memory_mib, time_limit_s or comment")
            _check_update(request, task, state, call.who)
            changes = {name: getattr(request, name) for name in request.__struct_fields__}
            return [e.TaskChanged(now, task.id, **changes)]

        await self._change_task(call, decide)
        return self._view(await self.shell.look_up(call.task), call.who)

    async def drain(self, call: ApiCall) -> t.Done:
        request: t.DrainRequest = call.body
        checks.check_comment(request.reason)
        gpu = _gpu(self.shell.state, request.gpu)
        await self.shell.commit([e.GpuDrained(self.shell.clock.now(), gpu, request.reason)])
        return t.Done(note=f"{_named(request.gpu)} takes no new tasks; running tasks continue")

    async def resume(self, call: ApiCall) -> t.Done:
        request: t.DrainRequest = call.body
        gpu = _gpu(self.shell.state, request.gpu)
        await self.shell.commit([e.GpuResumed(self.shell.clock.now(), gpu)])
        return t.Done(note=_resume_note(self.shell.state, request.gpu))

    async def _change_task(self, call: ApiCall, decide: Decide) -> Task:
        """Commit what `decide` returns for the task, which is returned as it was then. Only its owner and
        administrators may; it must not be finished."""
        before = await self._own_task(call)

        def make(state: State) -> Sequence[e.Durable]:
            nonlocal before
            before = self._find(call.task)
            if isinstance(before.status, s.Finished):
                raise WrongState(f"task {before.id} has already finished: {describe(before.status.outcome)}")
            return decide(state, before, self.shell.clock.now())

        await self.shell.change(make)
        return before

    def _find(self, task_id: TaskId) -> Task:
        """The task at the moment of the commit."""
        task = self.shell.find(task_id)
        if task is None:
            raise no_such_task(task_id)
        return task


def _dry_run(decision: Decision, state: State, sharing_note: str) -> t.SubmitAnswer:
    if decision.placement is None:
        note = f"would wait: {decision.reason}"
    else:
        indices = ", ".join(str(state.gpus[gpu].index) for gpu in decision.placement.gpus)
        note = f"would start on GPU {indices} now, {booked(decision.placement.booking)}"
    note += f"; {sharing_note}" if sharing_note else ""
    return t.SubmitAnswer(ids=(), note=note, explain=explain_entries(decision.verdicts, state))


def _running(task: Task, what: str) -> s.Running:
    """Raises WrongState unless the task runs and is not being stopped."""
    status = task.status
    if not isinstance(status, s.Running):
        waiting = isinstance(status, s.Queued | s.Estimating)
        hint = f"`carma hold {task.id}` keeps it from starting" if waiting else ""
        raise WrongState(f"task {task.id} is {s.state_name(status)}; only a running task can be {what}", hint)
    if status.ending is not None:
        raise WrongState(f"task {task.id} is being stopped: {describe(status.ending)}")
    return status


def _check_preempt(task: Task, *, hold: bool) -> None:
    """Raises WrongState if the task cannot be asked to save."""
    if task.spec.checkpoint is None:
        raise WrongState(
            f"task {task.id} cannot be preempted: it was submitted without a signal on which it saves",
            "submit such tasks with --checkpoint-signal; `carma cancel` stops this one without saving",
        )
    status = _running(task, "asked to save")
    if status.preempting is not None and (status.preempting.hold or not hold):
        raise WrongState(f"task {task.id} was already asked to save", "`carma show` says when and by whom")


def _check_pause(state: State, task: Task) -> None:
    """Raises WrongState if the task cannot be paused."""
    status = _running(task, "paused")
    if status.preempting is not None:
        raise WrongState(f"task {task.id} was asked to save and leave", "pause it again if it stays")
    if (reason := pausing.unpausable(state, task)) is not None:
        raise WrongState(
            f"task {task.id} cannot be paused: {reason}, and they end if one of them does not answer",
            "a task that saves checkpoints can be preempted: `carma preempt`",
        )


def _check_update(request: t.UpdateRequest, task: Task, state: State, who: Identity) -> None:
    waiting = isinstance(task.status, s.Pending)
    if not waiting and (request.priority is not None or request.gpu_memory_mib is not None):
        raise WrongState(
            f"task {task.id} is {s.state_name(task.status)}: its priority and memory can no longer be changed",
            "name, comment and time limit can be changed",
        )
    if request.name is not None:
        checks.check_name(request.name)
        _check_rename(task)
    if request.comment is not None:
        checks.check_comment(request.comment)
    if request.priority is not None:
        checks.check_priority(request.priority, who, before=task.spec.priority)
    checks.check_range("time_limit_s", request.time_limit_s, 0.001, checks.SECONDS)
    checks.check_range("gpu_memory_mib", request.gpu_memory_mib, 1, checks.MEMORY_MIB)
    if request.gpu_memory_mib is not None:
        checks.check_fits(state, replace(task.spec, gpu_memory_mib=request.gpu_memory_mib))


def _check_rename(task: Task) -> None:
    """The output files of an attempt are found by the task's fields, which must stay as they were at its start."""
    if task.attempts and any("%x" in (template or "") for template in (task.spec.output, task.spec.error)):
        raise WrongState(
            f"task {task.id} has started, and its name is a part of its output file's name (%x)",
            "a task with %x can only be renamed before it starts",
        )


def _gpu(state: State, name: str | None) -> GpuId | None:
    if name is None:
        return None
    for gpu in state.gpus.values():
        if name in (gpu.id, str(gpu.index)):
            return gpu.id
    raise NotFound(f"there is no GPU {name!r}", "`carma gpus` lists them, by index and UUID")


def _resume_note(state: State, gpu: str | None) -> str:
    if gpu is not None:
        return f"{_named(gpu)} takes new tasks" + (" once the server is resumed" if SERVER in state.drained else "")
    still = [str(found.index) for found in state.gpus.values() if found.id in state.drained]
    if not still:
        return "the server takes new tasks"
    stay = "stays" if len(still) == 1 else "stay"
    return f"the server takes new tasks; GPU {', '.join(still)} {stay} drained (`carma resume GPU` resumes one)"


def _named(gpu: str | None) -> str:
    return "the server" if gpu is None else f"GPU {gpu}"
