"""A trial run that was not run: a small model of two layers, trained for three steps with Adam."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from carma.core.model.values import NoEstimate
from carma.core.ports import EstimateRequest
from carma.trial.layers.description import Described, Layer
from carma.trial.protocol import Trial
from carma.trial.report import ALLOC, CALL, FORMAT, FREE, MARK, Call, TrialEvent, TrialReport

MIB = 1 << 20
MARKS = ("forward", "backward", "step", "step_end")


def write_events(events: Iterable[TrialEvent]) -> bytes:
    """Writes events as the user's interpreter does (`carma_trial/report.py`)."""
    return b"".join(struct.pack("<BBHIQq", *event) for event in events)


def described() -> Described:
    layers = (
        Layer(name="first", kind="Linear", output=(8, 1024), parameters=1024 * 1025, inputs=((8, 1024),)),
        Layer(name="act", kind="ReLU", output=(8, 1024), inputs=((8, 1024),)),
        Layer(name="head", kind="Linear", output=(8, 10), parameters=10 * 1025, inputs=((8, 1024),)),
    )
    config = {"model_type": "gpt2", "hidden_size": "1024", "num_hidden_layers": "2", "vocab_size": "10", "n_head": "4"}
    return Described(
        layers=layers,
        batch=8,
        parameters=1024 * 1025 + 10 * 1025,
        input=(8, 1024),
        optimizer="Adam",
        optimizer_slots=2,
        config=config,
    )


def report(**changed: object) -> TrialReport:
    told: dict[str, object] = {
        "format": FORMAT,
        "stop": "steps",
        "torch": "2.11.0+cu130",
        "steps": 3,
        "ops": ("", "aten::addmm"),
        "calls": (Call(op="blas", dtype=""), Call(op="blas_lt", dtype="")),
        "marks": MARKS,
        "parameters_bytes": 4 * MIB,
        "gradients_bytes": 4 * MIB,
        "optimizer_bytes": 8 * MIB,
        "described": described(),
    }
    return TrialReport(**{**told, **changed})  # type: ignore[arg-type]


def events() -> list[TrialEvent]:
    """Weights of 4 MiB, then each step: 40 MiB of activations, gradients, and once the optimizer's state."""
    found = [TrialEvent(ALLOC, 0, 0, 1, 1, 4 * MIB)]
    for step in range(3):
        first = 10 * (step + 1)
        found += [
            TrialEvent(MARK, 0, 0, 0, 0, 0),
            TrialEvent(CALL, 0, 0, 1, 0, 0),
            TrialEvent(ALLOC, 0, 0, 1, first, 40 * MIB),
            TrialEvent(MARK, 0, 0, 1, 0, 0),
            TrialEvent(CALL, 1, 0, 0, 0, 0),
            TrialEvent(ALLOC, 1, 0, 1, first + 1, 4 * MIB),
            TrialEvent(FREE, 1, 0, 0, first, 0),
            TrialEvent(MARK, 0, 0, 2, 0, 0),
        ]
        found += [TrialEvent(ALLOC, 0, 0, 1, 2, 8 * MIB)] if step == 0 else []
        found += [TrialEvent(MARK, 0, 0, 3, 0, 0), TrialEvent(FREE, 0, 0, 0, first + 1, 0)]
    return found


class ScriptedTrials:
    """Knows one command; all others cannot be run."""

    def __init__(self, command: tuple[str, ...], trial: Trial | None = None) -> None:
        self.command = command
        self.trial = trial or Trial(report=report(), events=write_events(events()), seconds=1.0)

    def run(self, request: EstimateRequest) -> Trial | NoEstimate:
        if request.spec.command != self.command:
            return NoEstimate(source="trace", reason="it cannot be run here")
        return self.trial

    def describe(self, request: EstimateRequest) -> Described | NoEstimate:
        ran = self.run(request)
        return ran if isinstance(ran, NoEstimate) else ran.report.described or described()
