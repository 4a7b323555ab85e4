"""Memory of a command with one new number, from a line through the measured runs.

Between two measured values the footprint lies between theirs. Beyond the largest, up to twice as far, it is
extrapolated with a bound that also holds if memory grows with the square (a sequence length). Everything else is a
refusal. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from carma.core.model.values import Record
from carma.core.telemetry.booking_shrink import with_margin

FURTHEST = 2.0  # maximum factor of the largest measured value
NOISE_SHARE, NOISE_MIB = 0.05, 256  # differences between runs of the same program, not a slope
STEEPER, MUCH_STEEPER = 2.0, 3.0  # times the last slope: enough for a square from half as far, or from zero
STRAIGHT = 1.25  # the same if three points show a line


class MeasuredPoint(Record, frozen=True, order=True):
    value: float
    mib: int


class Fit(Record, frozen=True, kw_only=True):
    footprint_mib: int
    upper_mib: int
    used: tuple[MeasuredPoint, ...]  # the points that were used
    beyond: bool = False  # extrapolated


def fit(points: Iterable[MeasuredPoint], value: float) -> Fit | str:
    """The footprint at `value`, or why it is unknown."""
    line = _highest(points)
    if len(line) < 2:
        return "two other values must have been measured"
    rising = _monotone(line)
    if rising is None:
        falling = _monotone([MeasuredPoint(-point.value, point.mib) for point in reversed(line)])
        if falling is None:
            return "memory went up and down with it"
        # Memory falls: beyond the ends its course is unknown.
        line = [MeasuredPoint(-point.value, point.mib) for point in reversed(falling)]
        inside = line[0].value <= value <= line[-1].value
        return _between(line, value) if inside else "memory fell with it, and the value lies outside those measured"
    if value > rising[-1].value:
        return _beyond(rising, value)
    if value < rising[0].value:  # at most the memory of the smallest value; how much less is unknown
        least = rising[0]
        return Fit(footprint_mib=least.mib, upper_mib=with_margin(least.mib), used=(least,), beyond=True)
    return _between(rising, value)


def _highest(points: Iterable[MeasuredPoint]) -> list[MeasuredPoint]:
    """One point for each value: the maximum."""
    most: dict[float, int] = {}
    for point in points:
        most[point.value] = max(most.get(point.value, 0), point.mib)
    return sorted(MeasuredPoint(value, mib) for value, mib in most.items())


def _monotone(line: Sequence[MeasuredPoint]) -> list[MeasuredPoint] | None:
    """The running maximum; None if memory falls by more than runs differ."""
    found: list[MeasuredPoint] = []
    highest = 0
    for point in line:
        if point.mib < highest - max(NOISE_MIB, NOISE_SHARE * highest):
            return None
        highest = max(highest, point.mib)
        found.append(MeasuredPoint(point.value, highest))
    return found


def _between(line: Sequence[MeasuredPoint], value: float) -> Fit:
    low = max(point for point in line if point.value <= value)
    high = min(point for point in line if point.value >= value)
    footprint = round(_drawn(low, high, value))
    most = max(low.mib, high.mib)  # holds for any monotone curve
    miss = _left_out(line)
    upper = with_margin(most) if miss is None else min(with_margin(most), with_margin(footprint) + round(2 * miss))
    return Fit(footprint_mib=footprint, upper_mib=max(upper, with_margin(footprint)), used=(low, high))


def _drawn(low: MeasuredPoint, high: MeasuredPoint, value: float) -> float:
    if high.value == low.value:
        return float(max(low.mib, high.mib))
    return low.mib + (high.mib - low.mib) * (value - low.value) / (high.value - low.value)


def _left_out(line: Sequence[MeasuredPoint]) -> float | None:
    """The largest error of the line at a measured point that is left out."""
    misses = [
        abs(mid.mib - _drawn(low, high, mid.value)) for low, mid, high in zip(line, line[1:], line[2:], strict=False)
    ]
    return max(misses, default=None)


def _beyond(line: Sequence[MeasuredPoint], value: float) -> Fit | str:
    last, before = line[-1], line[-2]
    if last.value <= 0 or value > FURTHEST * last.value:
        return f"it is more than {FURTHEST:g} times the largest value that was measured"
    slopes = [_slope(low, high) for low, high in pairwise(line)]
    steeper = MUCH_STEEPER if before.value < last.value / 2 else STEEPER
    if len(slopes) >= 2 and slopes[-1] <= STRAIGHT * slopes[-2]:
        steeper = STRAIGHT
    far = value - last.value
    slope = max(slopes[-1], _slope(line[0], last))
    footprint = round(last.mib + slope * far)
    upper = with_margin(round(last.mib + steeper * slope * far))
    return Fit(footprint_mib=footprint, upper_mib=upper, used=(before, last), beyond=True)


def _slope(low: MeasuredPoint, high: MeasuredPoint) -> float:
    return (high.mib - low.mib) / (high.value - low.value)
