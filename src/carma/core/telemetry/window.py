"""The last samples of a GPU and their summaries. The time of the newest sample is the only clock.

The risk formula is the published one (CARMA v2, active mode): .20 mean + .20 median + .30 p95 + .10 p50 + .20 EMA with
factor 2/(W+1). Median and p50 are the same, so the weight of the median is .30.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Literal

from msgspec.structs import replace

from carma.core.model.settings import Rules
from carma.core.model.values import GpuSample, Record

Metric = str  # a field of Activity
METRICS: tuple[Metric, ...] = ("sm_active", "sm_occupancy", "dram_active")  # those that the gate has caps for


class Summary(Record, frozen=True):
    """One metric over a window."""

    count: int  # samples
    mean: float
    p95: float
    risk: float

    def by(self, name: Literal["risk", "p95", "mean"]) -> float:
        return float(getattr(self, name))


def given(sample: GpuSample, metric: Metric) -> float | None:
    """The value, for inferred activity the expected one; None if it is missing, negative or not a number."""
    return _valid(getattr(sample.activity, metric))


def bound(sample: GpuSample, metric: Metric) -> float | None:
    """The value, for inferred activity its bound."""
    return _valid(getattr(sample.activity if sample.bound is None else sample.bound, metric))


def _valid(value: float | None) -> float | None:
    return value if value is not None and 0.0 <= value < inf else None


def quantile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation, as in numpy."""
    position = (len(ordered) - 1) * share
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarise(values: Sequence[float]) -> Summary:
    """Summary of at least one value, oldest first."""
    ordered = sorted(values)
    mean = sum(values) / len(values)
    p95 = quantile(ordered, 0.95)
    factor = 2.0 / (len(values) + 1)
    ema = values[0]
    for value in values[1:]:
        ema += factor * (value - ema)
    risk = 0.20 * mean + 0.30 * quantile(ordered, 0.5) + 0.30 * p95 + 0.20 * ema
    return Summary(len(values), mean, p95, risk)


class Gauges(Mapping[Metric, Summary]):
    """Summaries of the samples after `since`, by metric, computed on demand; of inferred activity, summaries of its
    bound. Metrics that the newest sample lacks are missing."""

    __slots__ = ("_known", "_samples", "_since")

    def __init__(self, samples: tuple[GpuSample, ...], since: float) -> None:
        self._samples = samples
        self._since = since
        self._known: dict[Metric, Summary | None] = {}

    def __getitem__(self, metric: Metric) -> Summary:
        if metric not in self._known:
            self._known[metric] = self._summary(metric)
        found = self._known[metric]
        if found is None:
            raise KeyError(metric)
        return found

    def __iter__(self) -> Iterator[Metric]:
        return (metric for metric in METRICS if metric in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _summary(self, metric: Metric) -> Summary | None:
        if not self._samples or bound(self._samples[-1], metric) is None:
            return None
        values = [
            value
            for sample in self._samples
            if sample.at > self._since and (value := bound(sample, metric)) is not None
        ]
        return summarise(values) if values else None


class Window:
    """The samples of one GPU over the last `length_s` seconds."""

    __slots__ = ("length_s", "samples")

    def __init__(self, length_s: float) -> None:
        self.length_s = length_s
        self.samples: deque[GpuSample] = deque()

    def add(self, sample: GpuSample) -> None:
        samples = self.samples
        if samples and sample.at <= samples[-1].at:
            return
        samples.append(sample)
        oldest = sample.at - self.length_s
        while samples[0].at < oldest:
            samples.popleft()

    @property
    def newest(self) -> GpuSample | None:
        return self.samples[-1] if self.samples else None

    def count_since(self, since: float) -> int:
        count = 0
        for sample in reversed(self.samples):
            if sample.at <= since:
                break
            count += 1
        return count

    def mean(self, metric: Metric, since: float = 0.0) -> float | None:
        """Mean of the values after `since`, of inferred activity the expected ones; None if the newest sample has
        none."""
        found = [given(sample, metric) for sample in self.samples if sample.at > since]
        values = [value for value in found if value is not None]
        return sum(values) / len(values) if values and found[-1] is not None else None

    def gauges(self, since: float = 0.0) -> Gauges:
        """Summaries of the current samples after `since`."""
        return Gauges(tuple(self.samples), since)


def sampled_every(rules: Rules, step_s: float) -> Rules:
    """The rules for a server with one sample every `step_s` seconds of its clock.

    The window must be long enough for `min_samples`, and a sample must not be stale before the next one is due. With a
    slow sampler or a fast clock, the configured seconds would close every GPU for ever.
    """
    window = replace(
        rules.window,
        length_s=max(rules.window.length_s, (rules.window.min_samples + 1) * step_s),
        stale_s=max(rules.window.stale_s, 3 * step_s),
    )
    return replace(rules, window=window)
