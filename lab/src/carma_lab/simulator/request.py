"""A simulation by the names of its parts, for the command line and the benchmarks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256

import msgspec

from carma import __version__
from carma.config import settings_of
from carma.core.model.values import Record
from carma.core.scheduling.sharing_model import Mechanism
from carma.errors import BadSettings, Usage
from carma.plugins import load_policy
from carma.traces import Trace, find
from carma_lab.runs.record import About, Run
from carma_lab.simulator import estimate_sources as sources
from carma_lab.simulator import simulated_cards as cards
from carma_lab.simulator.estimate_sources import COLUMN_OF
from carma_lab.simulator.simulation import Demands, OnProgress, Setup, Simulation

_BOOKINGS = "simulated tasks are not stopped above their bookings, and bookings do not shrink"
_SAMPLES = "samples are left out while nothing changes"
_MEMORY = "--memory selects the source"
# The reason why a setting has no effect, by its name or its section.
WITHOUT_EFFECT = {
    "placement.policy": "--policy selects the policy",
    "sharing.mechanism": "--mechanism selects the mechanism",
    "sharing.watchdog": _BOOKINGS,
    "sharing.watch_s": _BOOKINGS,
    "sharing.context_mib": "the memory of a trace includes the CUDA context",
    "memory.shrink": _BOOKINGS,
    "memory.sources": _MEMORY,
    "memory.estimators_at_once": _MEMORY,
    "memory.trial_limit_s": _MEMORY,
    "memory.trial_memory_mib": _MEMORY,
    "memory.level": _MEMORY,
    "window.stale_s": f"no sample is ever stale: {_SAMPLES}",
    "queue.misfits": "a task that fits on no GPU is ended",
    "quota.waiting": "it limits submissions, and all tasks of a trace are submitted",
    "monitor.period_s": "samples are five seconds apart",
    "daemon": "it is for the daemon only",
    "virtual": "--gpus and --gpu select the simulated GPUs",
    "launch": "no process is started",
}


def check_settings(names: Iterable[str]) -> None:
    for name in names:
        why = WITHOUT_EFFECT.get(name) or WITHOUT_EFFECT.get(name.partition(".")[0])
        if why is not None:
            raise BadSettings(f"{name} has no effect in the simulator: {why}", f"Leave out --set {name}=….")


def check_memory(memory: str, trace: Trace) -> None:
    """Refuses a trace without any estimate by that source, which would be simulated without estimates."""
    column = COLUMN_OF.get(memory)
    if column is not None and all(getattr(row, column) is None for row in trace.tasks):
        raise Usage(
            f"no task of {trace.name} has an estimate by {memory} (column {column})",
            "Use --memory none for tasks without estimates, or --memory measured for the true peaks.",
        )


MOST_GPUS = 65_536


class Request(Record, frozen=True, kw_only=True):
    trace: str = "t1"
    policy: str = "magm"
    gpus: int = 4
    gpu: str = "a100-40"
    memory: str = "measured"
    demand: Demands = "measured"
    mechanism: Mechanism = "mps"
    seed: int = 0
    noise: float = 0.0
    settings: Mapping[str, object] = {}  # by dotted name; other settings have their defaults


def recorded(request: Request, trace: Trace | None = None, on_progress: OnProgress | None = None) -> Run:
    """The whole run, with the course of the GPUs over time."""
    made = simulation(request, trace)
    figures = made.run(on_progress)
    about = About(
        simulated=True,
        trace=request.trace,
        policy=made.state.policy.name,
        memory=request.memory,
        demand=request.demand,
        mechanism=request.mechanism,
        gpu=made.setup.card.name,
        gpus=request.gpus,
        seed=request.seed,
        noise=request.noise,
        settings={name: str(value) for name, value in request.settings.items()},
        version=__version__,
        tasks=digest(made.trace),
    )
    return Run(about=about, figures=figures, tasks=tuple(made.runs), course=made.course, server=made.server)


def simulation(request: Request, trace: Trace | None = None) -> Simulation:
    """Ready to run. `trace`: the trace, if it was read before."""
    check_settings(request.settings)
    trace = find(request.trace) if trace is None else trace
    settings = settings_of({**request.settings, "placement.policy": request.policy})
    policy = load_policy(request.policy, settings.plugins)
    card = cards.find(request.gpu)
    source = sources.find(request.memory, request.seed)
    _check(trace, request, card)
    check_memory(request.memory, trace)
    return Simulation(
        trace,
        Setup(
            card=card,
            gpus=request.gpus,
            rules=settings.rules,
            policy=policy,
            source=source,
            demand=request.demand,
            mechanism=request.mechanism,
            seed=request.seed,
            noise=request.noise,
            measured=settings.monitor.sm_activity == "auto",
        ),
    )


def digest(trace: Trace) -> str:
    """Equal for equal tasks, independent of the trace's name."""
    return sha256(msgspec.json.encode(trace.tasks)).hexdigest()[:16]


def _check(trace: Trace, request: Request, card: cards.Card) -> None:
    for place, row in enumerate(trace.tasks, 1):
        if row.gpus > request.gpus:
            more = f"Simulate more GPUs (--gpus {row.gpus}), or remove" if row.gpus <= MOST_GPUS else "Remove"
            raise Usage(
                f"task {place} of {trace.name} ({row.name}) needs {row.gpus:,} GPUs, and there are {request.gpus:,}",
                f"{more} such tasks from the trace.",
            )
        if row.memory_mib > card.memory_mib:
            raise Usage(
                f"task {place} of {trace.name} ({row.name}) needs {row.memory_mib:,} MiB, and an {card.name} has "
                f"{card.memory_mib:,} MiB",
                _larger(row.memory_mib),
            )


def _larger(memory_mib: int) -> str:
    """The hint: cards with enough memory."""
    names = [f"--gpu {name}" for name, card in cards.CARDS.items() if card.memory_mib >= memory_mib]
    remove = "remove such tasks from the trace"
    return (
        f"Simulate a larger card ({' or '.join(names)}), or {remove}."
        if names
        else f"No card is large enough: {remove}."
    )
