"""Corrects rates of the sharing model with the observed steps of commands. Pure arithmetic, no state.

Each command has a deviation of its own and one beside each command that it has met. With n neighbours it runs at

    rate * exp(scale * (own + sum of those beside its neighbours / sqrt(n))),  scale = 0.08 + 0.3 * (1 - rate)

`scale` is the model's error on tasks with which it was not fitted, so that a deviation of 1 is a usual one. A deviation
begins at 0 with the variance that it has over commands (a prior), and every observation moves it by a Kalman step, in
proportion to what is not known of it yet. Older observations fade: before each step the variance grows by a tenth.

What follows: a command that never shared a GPU has no correction, and a task alone runs at rate 1. A rate lies in
(0, 1], and between 3/4 of the model's and 3/2 of it, whatever was observed: steps are counted in the user's own
processes, and a user can lie about them. An observation changes only the rates of the command whose steps were counted.
Deviations of its own keep the order of the model (more neighbours, lower rates); those beside a command may not.

The variances come from measured groups (lab/results/simulation/sharing.json, by `python -m lab.tools.sharing_fit`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, sqrt

from carma.core.model.values import Correction, Deviation

SCALE, SCALE_SLOPE = 0.08, 0.3  # the model's error: standard deviation of the log of a rate
OWN, BESIDE = 0.221, 0.313  # variances over commands, and over pairs of commands
NOISE = 0.281  # variance of one observation: what changes from one meeting of the same tasks to the next
FADES = 0.9  # factor of what was known, before an observation
SLOWER, FASTER = 0.75, 1.5  # limits of rate / model's rate
MOST_BESIDE = 16  # commands; the one that was met longest ago is forgotten
MOST_DEVIATION = 4.0  # a single observation counts as no more than that
UNOBSERVED = Deviation(0.0, BESIDE)
OF_ITS_OWN = ""  # the name of the deviation that does not depend on the neighbours


def unobserved(command: str) -> Correction:
    return Correction(command, Deviation(0.0, OWN))


def corrected(rates: Sequence[float], corrections: Sequence[Correction | None]) -> tuple[float, ...]:
    """The rates of tasks that share a GPU."""
    found = list(rates)
    names = [None if one is None else one.command for one in corrections]
    for place, known in enumerate(corrections):
        rate = rates[place]
        if known is None or rate >= 1.0:
            continue
        mean = known.own.mean
        for name, one in known.beside:
            copies = names.count(name) - (name == known.command)
            if copies:
                mean += copies * (len(rates) - 1) ** -0.5 * one.mean
        found[place] = min(1.0, rate * min(FASTER, max(SLOWER, exp(_scale(rate) * mean))))
    return tuple(found)


def uncertainty(corrections: Sequence[Correction | None]) -> list[float]:
    """For each task, the standard deviation of its rate / that of a task of which nothing was observed."""
    found = [1.0] * len(corrections)
    for place, known in enumerate(corrections):
        if known is not None:
            parts = _parts(known, _beside(corrections, place)).values()
            variance = sum([weight * weight * one.variance for weight, one in parts])
            found[place] = min(1.0, sqrt((variance + NOISE) / (OWN + BESIDE + NOISE)))
    return found


def observed(known: Correction, beside: Sequence[str], predicted: float, measured: float) -> Correction:
    """What is known of a command after it ran at `measured` beside those commands, where the model says `predicted`."""
    parts = {name: (weight, _faded(name, one)) for name, (weight, one) in _parts(known, beside).items()}
    deviation = log(measured / predicted) / _scale(predicted)
    error = max(-MOST_DEVIATION, min(MOST_DEVIATION, deviation))
    error -= sum([weight * one.mean for weight, one in parts.values()])
    total = NOISE + sum([weight * weight * one.variance for weight, one in parts.values()])
    moved = {name: _moved(weight, one, error, total) for name, (weight, one) in parts.items()}
    own = moved.pop(OF_ITS_OWN)
    kept = [entry for entry in known.beside if entry[0] not in moved]
    return Correction(known.command, own, (*kept, *moved.items())[-MOST_BESIDE:])


def _moved(weight: float, one: Deviation, error: float, total: float) -> Deviation:
    gain = weight * one.variance / total
    return Deviation(one.mean + gain * error, one.variance * (1.0 - gain * weight))


def _faded(name: str, one: Deviation) -> Deviation:
    return Deviation(one.mean, min(OWN if name == OF_ITS_OWN else BESIDE, one.variance / FADES))


def _scale(rate: float) -> float:
    return SCALE + SCALE_SLOPE * (1.0 - rate)


def _beside(corrections: Sequence[Correction | None], place: int) -> list[str]:
    """The commands of the other tasks; each unknown one has a name of its own."""
    names = [str(at) if one is None else one.command for at, one in enumerate(corrections)]
    del names[place]
    return names


def _parts(known: Correction, beside: Sequence[str]) -> dict[str, tuple[float, Deviation]]:
    """The deviations of which a rate beside those commands is made, by name, with their weights."""
    deviations = dict(known.beside)
    parts = {OF_ITS_OWN: (1.0, known.own)}
    weight = len(beside) ** -0.5
    for name in beside:
        before = parts.get(name)
        one = before[1] if before is not None else deviations.get(name, UNOBSERVED)
        parts[name] = (weight + (before[0] if before is not None else 0.0), one)
    return parts
