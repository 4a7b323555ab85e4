"""Small traces and setups for tests of the simulator."""

from __future__ import annotations

from carma.core.model.settings import Gate, Rules, WarmUp
from carma.core.policies import magm
from carma.core.scheduling.placement import Policy
from carma.traces import Trace, TraceTask
from carma_lab.simulator import estimate_sources as sources
from carma_lab.simulator import simulated_cards as cards
from carma_lab.simulator.simulation import Setup, Simulation

OPEN = Rules(gate=Gate(enabled=False), warmup=WarmUp(enabled=False))


def row(arrival_s: float = 0.0, **changes: object) -> TraceTask:
    given: dict[str, object] = {
        "name": "task",
        "gpus": 1,
        "memory_mib": 4_000,
        "seconds": 600.0,
        "sm_active": 0.4,
        "sm_occupancy": 0.2,
        "dram_active": 0.2,
        **changes,
    }
    return TraceTask(arrival_s=arrival_s, **given)  # type: ignore[arg-type]


def trace(*rows: TraceTask) -> Trace:
    return Trace(name="made.csv", tasks=rows)


def simulation(
    *rows: TraceTask, gpus: int = 1, rules: Rules = OPEN, policy: Policy = magm.POLICY, memory: str = "measured",
    mechanism: str = "mps", noise: float = 0.0, seed: int = 0,
) -> Simulation:  # fmt: skip
    setup = Setup(
        card=cards.find("a100-40"),
        gpus=gpus,
        rules=rules,
        policy=policy,
        source=sources.find(memory),
        mechanism=mechanism,  # type: ignore[arg-type]
        noise=noise,
        seed=seed,
        launch_s=0.0,
    )
    return Simulation(trace(*rows), setup)
