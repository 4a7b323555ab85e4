"""SM, DRAM, engine and tensor activity from NVML's GPU performance monitoring (GPM), Hopper and newer.

GPM gives averages between two snapshots. Two are kept for each GPU and used in turn. Snapshots less than about 100 ms
apart read 0 without an error on an H200 with driver 580, so they are never compared: a busy GPU would look idle. On
that machine a snapshot takes 0.28 ms of processor time and a comparison 0.04 ms, but 1.3 ms with engine activity.
Engine activity alone would cost 1 % of a core for eight GPUs, and no decision uses it, so it is queried at an interval
and repeated in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from carma.core.model.values import NO_ACTIVITY, Activity, Capabilities
from carma.monitor.gpu_faults import DriverGone, GpuLost, Nvml, ask, offers
from carma.trial.inside.carma_measure.gpu_counters import GPM_METRICS, MIN_SPACING_S, GpmRequest

ENGINE_S = 5.0  # between two requests for engine activity


def is_offered(nvml: Nvml, card: Any) -> bool:
    """Whether this card has GPM; false before Hopper and with drivers before R520."""
    support = ask(nvml, "nvmlGpmQueryDeviceSupport", card)
    return support is not None and bool(support.isSupportedDevice)


class GpmReader:
    """The two snapshots of one GPU. For a MIG instance: the card's handle and the id of its GPU instance.

    The constructor takes the first snapshot, so that the first reading can be compared with it. `offered` is false if
    the driver refuses snapshots for good (no permission), whatever the card supports.
    """

    capabilities = Capabilities(metrics=tuple(GPM_METRICS), source="gpm")

    def __init__(
        self,
        nvml: Nvml,
        card: Any,
        instance: int | None,
        monotonic: Callable[[], float],
        engine_s: float = ENGINE_S,
    ) -> None:
        self._nvml = nvml
        self._engine_s = engine_s
        self._engine_at: float | None = None  # of the last request for engine activity
        self._where: tuple[Any, ...] = (card,) if instance is None else (card, instance)
        self._take = "nvmlGpmSampleGet" if instance is None else "nvmlGpmMigSampleGet"
        self._monotonic = monotonic
        self._taken_at: float | None = None  # time of `_newest`; None: it contains nothing yet
        self._last = NO_ACTIVITY
        self._newest = ask(nvml, "nvmlGpmSampleAlloc")
        self._spare = ask(nvml, "nvmlGpmSampleAlloc")
        self._request = GpmRequest(nvml)
        self.offered = None not in (self._newest, self._spare) and offers(nvml, self._take, *self._where, self._spare)
        if self.offered:
            self._advance()

    def read(self) -> Activity:
        """The average since the last reading; the last values again if that is less than 100 ms ago.

        A counter that is busy gives no values this time, and the next reading covers the longer span.
        """
        if not self.offered:
            return NO_ACTIVITY
        if self._taken_at is not None and self._monotonic() - self._taken_at < MIN_SPACING_S:
            return self._last
        had_one = self._taken_at is not None
        if not self._advance():
            return NO_ACTIVITY
        self._last = self._compare() if had_one else NO_ACTIVITY
        return self._last

    def close(self) -> None:
        self.offered = False
        for snapshot in (self._newest, self._spare):
            if snapshot is not None:
                with contextlib.suppress(DriverGone, GpuLost):  # then the driver has freed it already
                    ask(self._nvml, "nvmlGpmSampleFree", snapshot)
        self._newest = self._spare = None

    def _advance(self) -> bool:
        """Take a snapshot into the spare one and make it the newest; on failure nothing changes."""
        if ask(self._nvml, self._take, *self._where, self._spare) is None:
            return False
        self._newest, self._spare = self._spare, self._newest
        self._taken_at = self._monotonic()
        return True

    def _compare(self) -> Activity:
        now = self._monotonic()
        with_engine = self._engine_at is None or now - self._engine_at >= self._engine_s
        found = self._request.fractions(
            lambda request: ask(self._nvml, "nvmlGpmMetricsGet", request),
            self._spare,
            self._newest,
            count=len(GPM_METRICS) if with_engine else len(GPM_METRICS) - 1,
        )
        if found is None:
            return NO_ACTIVITY
        if with_engine:
            self._engine_at = now
        else:
            found["gr_active"] = self._last.gr_active
        return Activity(**found)
