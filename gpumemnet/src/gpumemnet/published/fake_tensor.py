"""Fake tensors as the authors of CARMA used them (arXiv 2508.19073, their baseline "FakeTensor").

They create the weights first, then count the bytes of the storages of one forward and backward pass, and take the peak.
Without weights, optimizer step, rounding, segments and context it is below the truth by design. Here the same part of
the trial run is used: from the first forward pass to the first optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from carma.core.model.values import NoEstimate
from carma.core.ports import EstimateRequest
from carma.trial.protocol import Trial, Trials
from carma.trial.report import ALLOC, FREE, MARK, TrialEvent, read_events
from gpumemnet.published.common import Found, Parts, Published

_WARNINGS = (
    "leaves out the weights, the optimizer's state, the CUDA context, workspaces and the allocator's rounding; "
    "it is below what the command will take",
)


def _fake_tensor(trials: Trials, request: EstimateRequest) -> Found:
    trial = trials.run(request)
    if isinstance(trial, NoEstimate):
        return trial
    peak = _peak_of_first_pass(trial)
    if peak is None:
        return trial.report.reason or "no optimizer step was seen after a forward pass"
    return Parts({"activations": peak}, _WARNINGS, steps_seen=trial.report.steps)


def _peak_of_first_pass(trial: Trial) -> int | None:
    marks = trial.report.marks
    window: list[TrialEvent] = []
    started = False
    for event in read_events(trial.events):
        if event.kind == MARK and event.what < len(marks):
            started = started or marks[event.what] == "forward"
            if started and marks[event.what] == "step":
                return peak_bytes(window)
        elif started:
            window.append(event)
    return None


def peak_bytes(events: Iterable[TrialEvent]) -> int:
    """The maximum of bytes alive at once that these events allocate; earlier allocations are not counted."""
    alive: dict[int, int] = {}
    now = peak = 0
    for event in events:
        if event.kind == ALLOC:
            alive[event.id] = event.bytes
            now += event.bytes
            peak = max(peak, now)
        elif event.kind == FREE:
            now -= alive.pop(event.id, 0)
    return peak


make = partial(Published, "fake-tensor", _fake_tensor)
