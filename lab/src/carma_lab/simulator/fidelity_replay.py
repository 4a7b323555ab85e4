"""A recorded run as a simulation: the same arrivals, policy, settings and GPUs, and the tasks' behaviour alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from msgspec.structs import replace

from carma import __version__
from carma.config import settings_of
from carma.core.model.values import Demand, GpuId
from carma.core.scheduling.placement import Policy
from carma.core.scheduling.sharing_model import Mechanism
from carma.core.telemetry.window import sampled_every
from carma.errors import Usage
from carma.plugins import POLICIES, load_one, policy_name
from carma.traces import Trace, TraceTask
from carma.vgpu.device_state import VirtualGpu, power_w
from carma_lab.runs.figures import Asked, Figures, TaskRun
from carma_lab.runs.record import About, GpuOf, Run, Server
from carma_lab.simulator import simulated_cards as cards
from carma_lab.simulator.estimate_sources import no_estimate
from carma_lab.simulator.fidelity_solo import Known, Meters, Solo, solos
from carma_lab.simulator.simulated_cards import Card, Curve
from carma_lab.simulator.simulation import Setup, Simulation

LEAD_S = 60.0  # idle time before the first task, in which the GPUs are sampled
NOTHING = Curve(idle_w=0.0, most_w=0.0, of_sm=0.0, of_dram=0.0)
UNMEASURED = 0.05  # maximum share of the attempts' time without a figure; the figure then counts as 0
UNSEEN_MIB = 1  # of a task that never used a GPU


class VirtualCard(Card, frozen=True, kw_only=True):
    """The power of a virtual GPU."""

    def power_w(self, load: Demand) -> float:
        gpu = VirtualGpu(id="", index=0, name="", memory_mib=0, idle_w=self.idle_w, peak_w=self.most_w)
        return power_w(gpu, load)


class Replay:
    """One recorded run, ready to be simulated. `solos` and `tasks` have the same order."""

    def __init__(self, run: Run, known: Mapping[str, Known] | None = None, *, noise: float = 0.0, seed: int = 0):
        self.server = _checked_server(run)
        self.cards = [card_of(gpu) for gpu in self.server.gpus]
        self.tasks = sorted((task for task in run.tasks if task.attempts), key=lambda task: (task.arrival_s, task.task))
        if not self.tasks:
            raise Usage("no task of this run ever ran", "There is nothing to simulate.")
        self.left_out = len(run.tasks) - len(self.tasks)
        self.mechanism = _mechanism(run, self.server)
        self.solos = solos(self.tasks, self.mechanism, _meters(run, self.cards), known)
        self.lead_s = 0.0 if run.about.simulated else LEAD_S + 2 * self.server.period_s - self.tasks[0].arrival_s
        self.simulation = Simulation(self._trace(run.about.trace), self._setup(run, noise, seed))

    def _trace(self, name: str) -> Trace:
        rows = (_row(task, solo, self.lead_s) for task, solo in zip(self.tasks, self.solos, strict=True))
        return Trace(name=name, tasks=tuple(rows))

    def _setup(self, run: Run, noise: float, seed: int) -> Setup:
        settings = settings_of({**run.about.settings, "placement.policy": run.about.policy})
        policy = load_one(POLICIES, policy_name(run.about.policy))
        assert isinstance(policy, Policy)  # the registry holds nothing else
        return Setup(
            card=self.cards[0],
            gpus=len(self.cards),
            rules=sampled_every(settings.rules, self.server.period_s),
            policy=policy,
            source=no_estimate,
            mechanism=self.mechanism,
            seed=seed,
            noise=noise,
            period_s=self.server.period_s,
            launch_s=launch_s(self.tasks),
            watchdog=settings.sharing.watchdog and not run.about.simulated,
            asked=tuple(task.asked or Asked() for task in self.tasks),
            server=tuple((GpuId(gpu.gpu), card) for gpu, card in zip(self.server.gpus, self.cards, strict=True)),
        )

    def written(self, about: About, figures: Figures) -> Run:
        """The simulated run, with the clock and the names of the recorded run."""
        runs = sorted(self.simulation.runs, key=lambda task: task.task)
        tasks = (_earlier(made, task.task, self.lead_s) for made, task in zip(runs, self.tasks, strict=True))
        simulated = replace(about, simulated=True, version=__version__)
        return Run(about=simulated, figures=figures, tasks=tuple(tasks), course=(), server=self.server)

    @property
    def power_known(self) -> bool:
        return all(gpu.kind == "virtual" or known_card(gpu) is not None for gpu in self.server.gpus)


def _earlier(task: TaskRun, number: int, lead_s: float) -> TaskRun:
    return replace(
        task,
        task=number,
        arrival_s=task.arrival_s - lead_s,
        ended_s=task.ended_s - lead_s,
        attempts=tuple(
            replace(
                one,
                placed_at=one.placed_at - lead_s,
                ended_at=one.ended_at - lead_s,
                started_at=None if one.started_at is None else one.started_at - lead_s,
            )
            for one in task.attempts
        ),
    )


def _checked_server(run: Run) -> Server:
    hint = "Record the run with carma run-report --save FILE, or carma simulate --out FILE."
    if run.server is None:
        raise Usage("the file does not contain the GPUs of the run, so the run cannot be simulated", hint)
    used = {gpu for task in run.tasks for one in task.attempts for gpu in one.gpus}
    gone = sorted(used - {gpu.index for gpu in run.server.gpus})
    if gone:
        raise Usage(f"tasks of this run used GPUs that the server no longer had when the run was saved: {gone}", hint)
    ran = [one for task in run.tasks for one in task.attempts if one.used_s != 0.0]
    unseen_s = sum(one.ended_at - one.first_use for one in ran if one.activity is None)
    if unseen_s > UNMEASURED * sum(one.ended_at - one.first_use for one in ran):
        raise Usage(
            "the file has no GPU activity of tasks of this run, so their speeds cannot be computed",
            "carma doctor shows whether these GPUs provide activity.",
        )
    return run.server


def _mechanism(run: Run, server: Server) -> Mechanism:
    """Virtual GPUs share as under MPS, independent of the mechanism of their tasks."""
    if all(gpu.kind == "virtual" for gpu in server.gpus):
        return "mps"
    return "timeslice" if run.about.mechanism == "timeslice" else "mps"


def known_card(gpu: GpuOf) -> Card | None:
    return next((card for card in cards.CARDS.values() if card.name == gpu.name), None)


def card_of(gpu: GpuOf) -> Card:
    """The card with its real memory and idle power. An unknown card draws no power; its energy is not used."""
    if gpu.kind == "virtual":
        plain = VirtualGpu(id="", index=0, name="", memory_mib=0)
        curve = Curve(idle_w=plain.idle_w, most_w=plain.peak_w, of_sm=0.0, of_dram=0.0)
        return VirtualCard(name=gpu.name, memory_mib=gpu.memory_mib, curve=curve)
    found = known_card(gpu)
    if found is None:
        return Card(name=gpu.name, memory_mib=gpu.memory_mib, curve=NOTHING)
    curve = found.curve if gpu.idle_w is None else replace(found.curve, idle_w=gpu.idle_w)
    return replace(found, memory_mib=gpu.memory_mib, curve=curve)


def _meters(run: Run, found: Sequence[Card]) -> Meters:
    """A virtual task has no power and no engine activity of its own, and shows its whole demand from its first byte.
    In the file of a simulated run every figure is that of the task alone."""
    card = found[0]
    if isinstance(card, VirtualCard):
        return Meters(None, ramp_is_idle=False, engine="never")
    alike = all(other.most_w == card.most_w for other in found)
    above_idle_w = card.most_w - card.idle_w if alike and card.most_w > card.idle_w else None
    return Meters(above_idle_w, ramp_is_idle=True, engine="own" if run.about.simulated else "alone")


def launch_s(tasks: Sequence[TaskRun]) -> float:
    """Median time from a placement to the process."""
    seen = [one.started_at - one.placed_at for task in tasks for one in task.attempts if one.started_at is not None]
    return max(0.0, median(seen)) if seen else 0.0


def _row(task: TaskRun, solo: Solo, lead_s: float) -> TraceTask:
    limit_s = task.asked.time_limit_s if task.asked is not None else None
    # A task that was ended by its time limit had more work.
    seconds = solo.seconds + limit_s if task.outcome == "timed_out" and limit_s else solo.seconds
    return TraceTask(
        arrival_s=task.arrival_s + lead_s,
        name=task.name,
        gpus=task.gpus,
        memory_mib=memory_mib(task),
        seconds=max(seconds, 1e-3),
        sm_active=solo.demand.sm_active,
        sm_occupancy=solo.demand.sm_occupancy,
        dram_active=solo.demand.dram_active,
        gr_active=solo.demand.gr_active,
        power=solo.demand.power,
        start_s=solo.start_s,
        ramp_s=solo.ramp_s,
        busy_gpus=task.busy_gpus,
        user=task.user,
        priority=task.asked.priority if task.asked is not None else 0,
    )


def memory_mib(task: TaskRun) -> int:
    """Memory peak of the task; after an OOM with the failed allocation."""
    peaks = [one.memory_mib for one in task.attempts if one.memory_mib is not None]
    if task.outcome == "out_of_memory":
        peaks += [(one.memory_mib or 0) + one.asked_mib for one in task.attempts if one.asked_mib is not None]
    return max([*peaks, UNSEEN_MIB])
