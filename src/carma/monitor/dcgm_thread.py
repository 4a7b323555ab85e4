"""A thread that reads DCGM's figures, so that a host engine that hangs does not delay the samples of memory.

A call into libdcgm can block for a minute while the host engine is stopped or swapped out. The sampler only takes the
last figures, and no old ones. The thread exists only if some GPU has no better source.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from carma.core.model.values import NO_ACTIVITY, Activity, Capabilities
from carma.monitor.dcgm import FIELDS, PERIOD_S, HostEngine
from carma.monitor.devices import Place

FRESH_S = 3.0
FIRST_S = 3.0  # wait at the start: the host engine's first values come one period after the watch


class DcgmThread:
    """`watch` names the GPUs; `offers` and `latest` return their figures. Only the first `watch` waits."""

    def __init__(
        self,
        engine: HostEngine | None = None,
        *,
        period_s: float = PERIOD_S,
        first_s: float = FIRST_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine or HostEngine()
        self._period_s, self._first_s, self._monotonic = period_s, first_s, monotonic
        self._wanted: frozenset[Place] = frozenset()
        self._known: set[Place] = set()  # those that gave a figure at least once
        self._latest: dict[Place, tuple[float, Activity]] = {}
        self._settled = threading.Event()  # it is known whether DCGM gives any figure
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def problem(self) -> str | None:
        """Why DCGM does not give all wanted figures; None while none are wanted."""
        return self._engine.problem if self._wanted else None

    def watch(self, places: Iterable[Place]) -> None:
        self._wanted = frozenset(places)
        if self._wanted and self._thread is None and not self._closing.is_set():
            self._thread = threading.Thread(target=self._run, name="dcgm", daemon=True)
            self._thread.start()
            self._settled.wait(self._first_s)

    def offers(self, place: Place) -> bool:
        return place in self._known

    def latest(self, place: Place) -> Activity:
        at, activity = self._latest.get(place, (0.0, NO_ACTIVITY))
        return activity if self._monotonic() - at < FRESH_S else NO_ACTIVITY

    def close(self) -> None:
        """A thread that hangs in the library ends with the process."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while True:
            figures = self._read()
            now = self._monotonic()
            given = {place: activity for place, activity in figures.items() if activity != NO_ACTIVITY}
            self._latest = {place: (now, activity) for place, activity in given.items()}
            self._known |= set(given)
            if self._known or not figures:
                self._settled.set()
            if self._closing.wait(self._period_s):
                self._engine.close()
                return

    def _read(self) -> dict[Place, Activity]:
        try:
            return self._engine.read(self._wanted)
        except Exception as error:  # the end of the thread would mean missing figures without a reason
            self._engine.problem = f"reading DCGM failed: {type(error).__name__}: {error}"
            return {}


class DcgmReader:
    """The ActivityReader of one GPU that DCGM watches."""

    capabilities = Capabilities(metrics=tuple(FIELDS.values()), source="dcgm")

    def __init__(self, thread: DcgmThread, place: Place) -> None:
        self._thread, self._place = thread, place

    def read(self) -> Activity:
        """All figures are None while the host engine does not answer."""
        return self._thread.latest(self._place)

    def close(self) -> None:
        """The thread outlives its readers."""
