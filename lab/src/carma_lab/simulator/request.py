"""A simulation by its names, as the command line and the benchmarks ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Literal

import msgspec

from carma import __version__
from carma.config import settings_of
from carma.core.model.values import Record
from carma.core.scheduling.placement import Policy
from carma.errors import Usage
from carma.plugins import POLICIES, load_one, policy_name
from carma.traces import Trace, find
from carma_lab.runs.record import About, Run
from carma_lab.simulator import estimate_sources as sources
from carma_lab.simulator import simulated_cards as cards
from carma_lab.simulator.progress import Tell
from carma_lab.simulator.simulation import Demands, Setup, Simulation
from carma_lab.simulator.unused_options import check_memory, check_settings

MOST_GPUS = 65_536


class Request(Record, frozen=True, kw_only=True):
    trace: str = "t1"
    policy: str = "magm"
    gpus: int = 4
    gpu: str = "a100-40"
    memory: str = "measured"
    demand: Demands = "measured"
    mechanism: Literal["mps", "timeslice"] = "mps"
    seed: int = 0
    noise: float = 0.0
    settings: Mapping[str, object] = {}  # dotted names; all others are at their defaults


def recorded(request: Request, trace: Trace | None = None, tell: Tell | None = None) -> Run:
    """The whole run, with the course of the GPUs over time."""
    made = simulation(request, trace, watched=True)
    figures = made.run(tell)
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


def simulation(request: Request, trace: Trace | None = None, *, watched: bool = False) -> Simulation:
    """Ready to run. `trace`: one that was read already."""
    check_settings(request.settings)
    trace = find(request.trace) if trace is None else trace
    settings = settings_of({**request.settings, "placement.policy": request.policy})
    policy = load_one(POLICIES, policy_name(request.policy))
    assert isinstance(policy, Policy)  # the registry holds nothing else
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
            watched=watched,
        ),
    )


def digest(trace: Trace) -> str:
    """The same for the same tasks, by whatever name."""
    return sha256(msgspec.json.encode(trace.tasks)).hexdigest()[:16]


def _check(trace: Trace, request: Request, card: cards.Card) -> None:
    for place, row in enumerate(trace.tasks, 1):
        if row.gpus > request.gpus:
            more = f"Simulate more GPUs (--gpus {row.gpus}), or cut" if row.gpus <= MOST_GPUS else "Cut"
            raise Usage(
                f"task {place} of {trace.name} ({row.name}) wants {row.gpus:,} GPUs, and there are {request.gpus:,}",
                f"{more} such tasks out of the trace.",
            )
        if row.memory_mib > card.memory_mib:
            raise Usage(
                f"task {place} of {trace.name} ({row.name}) takes {row.memory_mib:,} MiB, and an {card.name} has "
                f"{card.memory_mib:,} MiB",
                _larger(row.memory_mib),
            )


def _larger(memory_mib: int) -> str:
    """What to type: the cards that hold so much."""
    names = [f"--gpu {name}" for name, card in cards.CARDS.items() if card.memory_mib >= memory_mib]
    cut = "cut such tasks out of the trace"
    return f"Simulate a larger card ({' or '.join(names)}), or {cut}." if names else f"No card holds it: {cut}."
