"""Activity from DCGM's host engine: for cards before Hopper, which have no GPM (Volta, Turing, Ampere, Ada).

1. `HostEngine` is a connection to the host engine.
2. `DcgmThread` reads it in a thread of its own: a call into libdcgm can block for a minute while the host engine is
   stopped or swapped out, which must not delay the samples of memory. The sampler only takes the last figures, and no
   old ones. The thread exists only if some GPU has no better source.

Absence is normal: no library, no host engine, a profiling module that is not loaded, a watch that is refused, values
that are blank or old. All of it gives missing figures and is retried at increasing intervals. Nothing here raises.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from itertools import count

from carma.core.model.values import NO_ACTIVITY, Activity, Capabilities, GpuId
from carma.monitor.devices import Place
from carma.monitor.libdcgm import UUID_FIELD, DcgmError, Entity, Libdcgm, Value, open_library
from carma.monitor.query_intervals import BackOff

ADDRESS = "127.0.0.1"  # the host engine of this machine, at its usual port; never another machine's
CONNECT_MS = 1000
PERIOD_S = 1.0  # interval at which the host engine reads the counters
STALE_S = 5.0  # an older value is ignored
FRESH_S = 3.0  # the thread's figures are no older
FIRST_S = 3.0  # wait at the start: the host engine's first values come one period after the watch
# dcgm_fields.h, DCGM_FI_PROF_*: each a mean over the host engine's last period, from 0 to 1.
FIELDS = {1002: "sm_active", 1003: "sm_occupancy", 1005: "dram_active", 1001: "gr_active", 1004: "tensor_active"}


class HostEngine:
    """One connection, made at the first need and again after it breaks. For one thread at a time."""

    def __init__(
        self,
        library: Callable[[], Libdcgm | None] = open_library,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._open_library, self._monotonic, self._wall = library, monotonic, wall
        self._library: Libdcgm | None = None
        self._handle: int | None = None
        self._watched: dict[Entity, Place] = {}
        self._numbers = count(1)  # make the names of our groups unique within the host engine
        self._retry = BackOff(first_s=5.0, limit_s=600.0)
        self._tried = False
        self.problem: str | None = None  # why the last try did not give all figures

    def read(self, places: Iterable[Place]) -> dict[Place, Activity]:
        """The known figures of those places. Places that are not watched yet are tried when a try is due."""
        wanted = set(places)
        if not wanted:
            return {}
        try:
            if not wanted <= set(self._watched.values()) and self._due():
                self._watch_all(wanted)
            if self._library is None or self._handle is None:
                return {}
            return self._values(self._library, self._handle, wanted)
        except DcgmError as error:
            self.problem = f"the DCGM host engine does not answer: {error}"
            self._disconnect()
            return {}

    def close(self) -> None:
        self._disconnect()
        if self._library is not None:
            self._library.close()
            self._library = None

    def _due(self) -> bool:
        first, self._tried = not self._tried, True
        return self._retry.due(self._monotonic()) or first

    def _watch_all(self, wanted: set[Place]) -> None:
        """Connect if necessary, and watch the unwatched places, each card separately: one refusal leaves the others."""
        self.problem = None
        self._library = library = self._library or self._open_library()
        if library is None:
            self.problem = "there is no DCGM library (libdcgm.so.4 or .3)"
            return
        if self._handle is None:
            self._handle = library.connect(ADDRESS, CONNECT_MS)
        found = _find(library, self._handle, wanted - set(self._watched.values()))
        for card in sorted({place.card for place in found.values()}):
            entities = {entity: place for entity, place in found.items() if place.card == card}
            name = f"carma-{os.getpid()}-{next(self._numbers)}"
            try:
                library.watch(self._handle, name, list(entities), list(FIELDS), PERIOD_S)
            except DcgmError as error:
                self.problem = f"the DCGM host engine does not watch activity: {error}"
            else:
                self._watched |= entities
        if wanted <= set(self._watched.values()):
            self._retry.reset()
        elif self.problem is None:
            self.problem = "the DCGM host engine does not know all of the GPUs"

    def _values(self, library: Libdcgm, handle: int, wanted: set[Place]) -> dict[Place, Activity]:
        entities = [entity for entity, place in self._watched.items() if place in wanted]
        if not entities:
            return {}
        oldest_us = (self._wall() - STALE_S) * 1e6
        figures: dict[Place, dict[str, float | None]] = {self._watched[entity]: {} for entity in entities}
        for value in library.latest(handle, entities, list(FIELDS)):
            if value.entity in self._watched and value.field in FIELDS:
                figures[self._watched[value.entity]][FIELDS[value.field]] = _share(value, oldest_us)
        return {place: Activity(**given) for place, given in figures.items()}

    def _disconnect(self) -> None:
        handle, self._handle = self._handle, None
        self._watched = {}
        if handle is not None and self._library is not None:
            with contextlib.suppress(DcgmError):
                self._library.disconnect(handle)


def _find(library: Libdcgm, handle: int, wanted: set[Place]) -> dict[Entity, Place]:
    """DCGM's numbers of those places. They are the host engine's own, and change when it restarts."""
    found: dict[Entity, Place] = {}
    gpus = library.gpus(handle)
    for value in library.latest(handle, gpus, [UUID_FIELD], live=True) if gpus else ():
        if value.status == 0:
            found[value.entity] = Place(GpuId(str(value.value)))
    if any(place.instance is not None for place in wanted):
        with contextlib.suppress(DcgmError):  # then without instances; a broken connection shows at the next call
            for uuid, instance, entity in library.instances(handle):
                found[entity] = Place(GpuId(uuid), instance)
    return {entity: place for entity, place in found.items() if place in wanted}


def _share(value: Value, oldest_us: float) -> float | None:
    """Blank values (not found, not supported, not permitted) are numbers from 2**47 on; see dcgm_structs.h."""
    if value.status != 0 or value.at_us < oldest_us or not isinstance(value.value, float):
        return None
    return min(1.0, value.value) if 0.0 <= value.value <= 1.1 else None


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
