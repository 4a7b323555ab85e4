"""One simulated run: events from the heap go to the core, and its commands to the simulated GPUs.

The core is driven as the daemon drives it: `step` gets an event, the simulation carries out the commands, and the
events that `propose` finds due follow, until none is due. Time advances only from one entry of the heap to the next.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from heapq import heappop, heappush
from math import inf

from carma.core import undo
from carma.core.attempt_end import ended
from carma.core.machine import step
from carma.core.model import events as e
from carma.core.model.commands import (
    Command,
    EstimateTask,
    LaunchAttempt,
    PreemptAttempt,
    SetPaused,
    StopAttempt,
    WarnAttempt,
)
from carma.core.model.outcome import Outcome, Succeeded
from carma.core.model.status import Finished, Recovering, Running, Starting
from carma.core.model.task import Task
from carma.core.model.values import AttemptKey, Confinement, Guard, TaskId
from carma.core.propose import propose
from carma.core.scheduling.verdict_cache import VerdictCache
from carma.core.state import State
from carma.traces import Trace, TraceTask
from carma_lab.runs import figures as result
from carma_lab.runs.record import Course, GpuOf, Point, Server
from carma_lab.simulator.sampling import SimulatedSampler, StepCounter
from carma_lab.simulator.setup import Demands as Demands
from carma_lab.simulator.setup import Noise
from carma_lab.simulator.setup import Setup as Setup
from carma_lab.simulator.setup import rules_for as rules_for
from carma_lab.simulator.simulated_server import RunningTask, SimulatedGpu, SimulatedServer, build_gpus
from carma_lab.simulator.task_knowledge import TaskKnowledge
from carma_lab.simulator.task_records import owner_of, run_of, saved_work_s, spec_of, stalled

MOST_IDLE_HEARTBEATS = 100  # heartbeats
HEARTBEAT_S = 60.0  # period in which events that depend on time alone are noticed while a task waits
EVERY = 256  # events, some hundredths of a second
OnProgress = Callable[[int, int, float], None]  # ended tasks, all tasks, simulated seconds


Due = Callable[[], e.AnyEvent | None]  # what happens at a known time; None: nothing new for the core


class Simulation:
    def __init__(self, trace: Trace, setup: Setup) -> None:
        self.trace, self.setup = trace, setup
        self.rules = rules_for(setup)
        self.state: State = State(self.rules, setup.policy)
        self.now = 0.0
        self._gpus, boards = build_gpus(setup.card, setup.gpus, setup.server)
        self._index = {gpu.id: gpu.index for gpu in self._gpus}
        self._heap: list[tuple[float, int, Due]] = []
        self._pushed = itertools.count()  # entries of the same time come in this order
        noise = Noise(setup.noise, setup.seed, setup.mechanism)
        self.world = SimulatedServer(boards, setup.mechanism, noise.factors, self._schedule)
        quiet_s = max(self.rules.window.length_s, self.rules.warmup.settle_s) + 2 * setup.period_s
        self._sampler = SimulatedSampler(
            self._gpus, boards, setup.period_s, quiet_s, lambda at: self._push(at, self._sample_due), setup.measured
        )
        self._steps = StepCounter(
            quiet_s, setup.noise, setup.seed, lambda at, board: self._push(at, partial(self._count, board))
        )
        self._verdicts = VerdictCache()
        self._runners: dict[AttemptKey, RunningTask] = {}
        self._orders: dict[AttemptKey, LaunchAttempt] = {}
        self._rows: dict[TaskId, TraceTask] = {}
        self._ended: dict[AttemptKey, RunningTask] = {}  # at their ends
        self._saved: dict[TaskId, float] = {}  # seconds of saved work
        self._knowledge = TaskKnowledge(setup, self._gpus)
        self._finished: list[tuple[float, Task]] = []  # with the time of their end; not yet removed from the core
        self._awake = False
        self._undo_at = inf  # when something about slowed or paused tasks is due
        self._arrived = 0  # tasks
        self._idle = 0  # consecutive heartbeats without a running or expected task
        self.runs: list[result.TaskRun] = []
        self._course = Course(boards, lambda: (len(self.state.active), len(self.state.queue)))

    @property
    def course(self) -> tuple[Point, ...]:
        return tuple(self._course.points)

    @property
    def server(self) -> Server:
        gpus = (
            GpuOf(gpu=gpu.id, index=gpu.index, name=gpu.name, memory_mib=gpu.memory_mib, idle_w=board.card.idle_w)
            for gpu, board in zip(self._gpus, self.world.boards, strict=True)
        )
        return Server(gpus=tuple(gpus), period_s=self.setup.period_s)

    def run(self, on_progress: OnProgress | None = None) -> result.Figures:
        """`on_progress` is called every 256 events and at the end."""
        began = time.perf_counter()
        for number, _ in enumerate(self.events(), 1):
            if on_progress is not None and number % EVERY == 0:
                on_progress(len(self.runs), len(self.trace.tasks), self.now)
        if on_progress is not None:
            on_progress(len(self.runs), len(self.trace.tasks), self.now)
        return self.figures(time.perf_counter() - began)

    def events(self) -> Iterator[e.AnyEvent]:
        """All events that the core gets, in order: the log of the run."""
        yield from self._apply(e.GpusFound(0.0, self._gpus))
        self._sampler.changed(self.world.boards, 0.0)
        if self.trace.tasks:
            self._push(self.trace.tasks[0].arrival_s, partial(self._arrival, 0))
        while self._heap:
            at, _, due = heappop(self._heap)
            self._note(at)
            self.now = at
            event = due()
            if event is not None:
                yield from self._apply(event)
            while decided := propose(self.state, self.now, self._verdicts):
                for each in decided:
                    yield from self._apply(each)
            if self.state.queue or self.state.between_attempts:
                self._wake_later()
            self._wake_for_undo()
        self._note(self.now + self._course.step_s)

    def figures(self, took_s: float) -> result.Figures:
        end = max((run.ended_s for run in self.runs), default=0.0)
        boards = self.world.boards
        first = self.trace.tasks[0].arrival_s
        span_s = max(1e-9, (end - first) * len(boards))
        # GPUs are idle before the first arrival and after the last end; that energy does not count.
        energy_j = sum(board.totals(end).energy_j for board in boards)
        energy_j -= sum(board.card.idle_w * first for board in boards)
        return result.figures(
            self.runs,
            took_s=took_s,
            energy_j=energy_j,
            sm_active_mean=sum(board.sums.sm_s for board in boards) / span_s,
            sm_occupancy_mean=sum(board.sums.occupancy_s for board in boards) / span_s,
            dram_active_mean=sum(board.sums.dram_s for board in boards) / span_s,
            memory_mib_mean=sum(board.sums.memory_mib_s for board in boards) / span_s,
            power_w_mean=energy_j / span_s,
        )

    # What happens at a known time.

    def _push(self, at: float, due: Due) -> None:
        heappush(self._heap, (at, next(self._pushed), due))

    def _wake(self) -> None:
        self._awake = False
        self._check_alive()

    def _sample_due(self) -> e.GpusSampled | None:
        samples = self._sampler.sample(self.now)
        if samples is not None:
            self._forget()
        return samples

    def _changed(self, boards: Iterable[SimulatedGpu], now: float, at_once: bool = False) -> None:
        self._sampler.changed(boards, now)
        if self.setup.steps:
            self._steps.changed(boards, now, at_once)

    def _count(self, board: SimulatedGpu) -> e.StepsCounted | None:
        return self._steps.count(board, self.now)

    def _note(self, until: float) -> None:
        """Records the steps of the course that end by then, up to the end of the last task. Nothing changes between two
        entries of the heap, so the course needs no entries of its own and does not affect decisions."""
        course = self._course
        last_s = self.runs[-1].ended_s if self.runs else 0.0
        while course.next_at <= until:
            if len(self.runs) == len(self.trace.tasks) and course.since >= last_s:
                return
            course.record(course.next_at)

    def _arrival(self, place: int) -> e.TaskSubmitted:
        row = self.trace.tasks[place]
        if place + 1 < len(self.trace.tasks):
            self._push(self.trace.tasks[place + 1].arrival_s, partial(self._arrival, place + 1))
        self._arrived = place + 1
        task = TaskId(self._arrived)
        self._rows[task] = row
        asked = self.setup.asked[place] if self.setup.asked else result.Asked(priority=row.priority)
        return e.TaskSubmitted(self.now, task, owner_of(row.user), spec_of(row, asked))

    def _started(self, key: AttemptKey) -> e.AttemptStarted | None:
        if self.state.active.get(key.task) != key:
            return None  # stopped before its start
        cap_mib = self._orders[key].placement.booking.cap_mib
        guards = () if cap_mib is None else (Guard(rung="framework", limit_mib=cap_mib),)
        confinement = Confinement(mechanism=self.setup.mechanism, guards=guards)
        self._push(self.now + self._rows[key.task].start_s, partial(self._begun, key))
        return e.AttemptStarted(self.now, key, pid=key.task, confinement=confinement)

    def _begun(self, key: AttemptKey) -> e.AttemptEnded | None:
        if self.state.active.get(key.task) != key:
            return None
        placement = self._orders[key].placement
        boards = tuple(self.world.boards[self._index[gpu]] for gpu in placement.gpus)
        done_s = self._saved.get(key.task, 0.0)
        runner = RunningTask(key, self._rows[key.task], boards, placement.booking.cap_mib, self.now, done_s)
        self._runners[key] = runner
        self._changed(boards, self.now)
        return self._ending(runner, self.world.begin(runner, self.now))

    def _due(self, runner: RunningTask, version: int) -> e.AttemptEnded | None:
        if runner.version != version:
            return None
        self._changed(runner.boards, self.now)
        return self._ending(runner, self.world.due(runner, self.now))

    def _ending(self, runner: RunningTask, outcome: Outcome | None) -> e.AttemptEnded | None:
        if outcome is None:
            return None
        self._ended[runner.key] = self._runners.pop(runner.key)
        self._keep(runner)
        return ended(self.state, runner.key, outcome, self.now)

    # Preemption.

    def _ask_to_save(self, key: AttemptKey) -> None:
        """The task stops its work, saves for `save_s`, and leaves."""
        runner = self._runners.get(key)
        if runner is not None:
            self._changed(runner.boards, self.now)
            self.world.save(runner, self.now)
        save_s = 0.0 if runner is None else self._rows[key.task].save_s
        self._push(self.now + (save_s or 0.0), partial(self._saved_and_left, key))

    def _saved_and_left(self, key: AttemptKey) -> e.AttemptEnded | None:
        if self.state.active.get(key.task) != key:
            return None  # stopped meanwhile
        runner = self._runners.get(key)
        if runner is None:  # it had not used a GPU yet
            return ended(self.state, key, Succeeded(), self.now)
        self._changed(runner.boards, self.now)
        self.world.leave(runner, self.now)
        return self._ending(runner, Succeeded())

    def _keep(self, runner: RunningTask) -> None:
        """Stores the work that the next attempt need not repeat."""
        done_s = saved_work_s(runner)
        if done_s > 0.0:
            self._saved[runner.key.task] = done_s

    # Pauses.

    def _set_paused(self, key: AttemptKey, paused: bool) -> None:
        runner = self._runners.get(key)
        if runner is not None:
            self._changed(runner.boards, self.now, at_once=True)
            self.world.set_paused(runner, paused, self.now)

    def _wake_for_undo(self) -> None:
        """What is due then depends on the time alone."""
        at = undo.next_at(self.state, self.now)
        if at < self._undo_at or self._undo_at <= self.now:
            self._undo_at = at
            if at < inf:
                self._push(at, lambda: None)

    def _schedule(self, at: float, runner: RunningTask, version: int) -> None:
        self._push(at, partial(self._due, runner, version))

    # The core.

    def _apply(self, event: e.AnyEvent) -> Iterator[e.AnyEvent]:
        commands = step(self.state, event)
        self._knowledge.follow(self.state, event)
        yield event
        if isinstance(event, e.TaskFinished | e.StopRequested):
            self._over(event.task)
        for command in commands:
            yield from self._do(command)

    def _do(self, command: Command) -> Iterator[e.AnyEvent]:
        match command:
            case EstimateTask(task=task):
                later_s = self.setup.asked[task - 1].estimated_s if self.setup.asked else 0.0
                if later_s > 0.0:
                    self._push(self.now + later_s, partial(self._estimated, task))
                else:
                    yield from self._apply(self._estimated(task))
            case LaunchAttempt(key=key):
                self._orders[key] = command
                self._push(self.now + self.setup.launch_s, partial(self._started, key))
            case StopAttempt(key=key):
                yield from self._stopped(key)
            case PreemptAttempt(key=key):
                self._ask_to_save(key)
            case SetPaused(key=key, paused=paused):
                self._set_paused(key, paused)
            case WarnAttempt():
                pass

    def _estimated(self, task: TaskId) -> e.TaskEstimated:
        if self.setup.asked:
            return e.TaskEstimated(self.now, task, self.setup.asked[task - 1].estimate)
        return self._knowledge.estimated(self.state.tasks[task], self._rows[task], self.now)

    def _stopped(self, key: AttemptKey) -> Iterator[e.AnyEvent]:
        """A stopped process ends at once."""
        runner = self._runners.pop(key, None)
        match self.state.tasks[key.task].status:
            case (Starting() | Running()) as status if status.ending is not None:
                outcome = status.ending
            case status:
                raise AssertionError(f"{key} is stopped, but nothing asked for it: {status}")
        if runner is not None:
            self._changed(runner.boards, self.now)
            self.world.leave(runner, self.now)
            self._ended[key] = runner
            self._keep(runner)
        yield from self._apply(ended(self.state, key, outcome, self.now))

    def _check_alive(self) -> None:
        """A policy that places no task on idle GPUs would let the simulation run forever."""
        alive = (
            self.state.active
            or self.state.between_attempts
            or len(self._heap) > 1
            or self._arrived < len(self.trace.tasks)
        )
        self._idle = 0 if alive else self._idle + 1
        if self._idle > MOST_IDLE_HEARTBEATS:
            raise stalled(self.state, self.now)

    def _over(self, task_id: TaskId) -> None:
        task = self.state.tasks[task_id]
        if not isinstance(task.status, Finished):
            return
        row = self._rows.pop(task_id)
        self._saved.pop(task_id, None)
        keys = [AttemptKey(task_id, attempt.number) for attempt in task.attempts]
        self.runs.append(run_of(task, row, self._index, [self._ended.pop(key, None) for key in keys]))
        for key in keys:
            self._orders.pop(key, None)
        self._finished.append((task.status.at, task))

    def _forget(self) -> None:
        """Removes finished tasks from the core after the next sample: until then it shows their processes."""
        if self._finished:
            for at, task in self._finished:
                if at < self.now:
                    self.state.drop(task.id)
            self._finished = [entry for entry in self._finished if entry[0] >= self.now]

    def _wake_later(self) -> None:
        waits = [
            task.status.until
            for task in (self.state.tasks[task_id] for task_id in self.state.between_attempts)
            if isinstance(task.status, Recovering)
        ]
        for until in waits:
            self._push(max(until, self.now), self._wake)
        if not self._awake:
            self._awake = True
            self._push(self.now + HEARTBEAT_S, self._wake)
