"""The metrics as prometheus_client takes them: readings of the state, and counts.

Counters and histograms count events since the start of the daemon, as Prometheus expects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from carma.core.model import events as e
from carma.core.model.outcome import OutOfMemory, Succeeded
from carma.core.model.task import Attempt, Task
from carma.core.model.values import AttemptKey, tag_of
from carma.core.state import State
from carma.core.telemetry import step_rates
from carma.daemon.metrics.families import COUNTED, CURRENT, Family
from carma.daemon.metrics.readings import Reading


class Counts:
    """Counts what happens. Called on the event loop, after each event was stepped."""

    def __init__(self) -> None:
        # Otherwise each series of counts has a second one with the time of its start.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        for family in COUNTED:
            self._add(family)

    def _add(self, family: Family) -> None:
        if family.kind == "counter":
            made = Counter(family.name, family.text, family.labels, registry=self.registry)
            self._counters[family.name] = made
            for value in family.values:
                made.labels(value)
        else:
            buckets = family.buckets
            histogram = Histogram(family.name, family.text, family.labels, registry=self.registry, buckets=buckets)
            self._histograms[family.name] = histogram

    def decided(self, seconds: float) -> None:
        self._histograms["carma_decision_seconds"].observe(seconds)

    def stepped(self, event: e.Durable, state: State) -> None:
        match event:
            case e.AttemptStarted(key=AttemptKey(attempt=1) as key):
                waited_s = event.at - state.tasks[key.task].submitted_at
                self._histograms["carma_task_wait_seconds"].observe(max(0.0, waited_s))
            case e.AttemptEnded(key=key):
                self._attempt_ended(state, state.tasks[key.task], key)
            case e.RecoveryPlanned(plan=plan):
                self._counters["carma_recoveries_total"].labels(plan.rung).inc()
            case e.TaskFinished(outcome=outcome):
                self._counters["carma_tasks_finished_total"].labels(tag_of(outcome)).inc()
            case _:
                pass

    def _attempt_ended(self, state: State, task: Task, key: AttemptKey) -> None:
        attempt = next((one for one in task.attempts if one.number == key.attempt), None)
        if attempt is None or attempt.outcome is None:
            return
        if isinstance(attempt.outcome, OutOfMemory):
            blame = "host" if attempt.outcome.where == "host" else attempt.blame or "unknown"
            self._counters["carma_ooms_total"].labels(blame).inc()
        slowed = step_rates.slowdown(state, task, attempt)
        if slowed is not None:
            source = "inferred" if slowed.inferred else "measured"
            self._histograms["carma_task_slowdown_ratio"].labels(source).observe(slowed.value)
        error = _estimate_error(task, attempt)
        if error is not None and task.estimate is not None:
            self._histograms["carma_estimate_error_ratio"].labels(task.estimate.source).observe(error)


def _estimate_error(task: Task, attempt: Attempt) -> float | None:
    """Of the footprint; None for a task that failed, which may have ended before its peak."""
    if task.estimate is None or not attempt.observed_mib or not isinstance(attempt.outcome, Succeeded):
        return None
    return abs(task.estimate.footprint_mib - attempt.observed_mib) / attempt.observed_mib


class Exposition:
    """A collector over readings that were taken before, and the counts."""

    def __init__(self, readings: Sequence[Reading], counts: Counts) -> None:
        self._readings = readings
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        families = {family.name: _empty(family) for family in CURRENT}
        for name, labels, value in self._readings:
            families[name].add_metric(labels, value)
        yield from families.values()
        yield from self._counts.registry.collect()


def _empty(family: Family) -> GaugeMetricFamily | CounterMetricFamily:
    kind = GaugeMetricFamily if family.kind == "gauge" else CounterMetricFamily
    return kind(family.name, family.text, labels=family.labels)
