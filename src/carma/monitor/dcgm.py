"""Activity from DCGM's host engine: for cards before Hopper, which have no GPM (Volta, Turing, Ampere, Ada).

Absent is normal: no library, no host engine, a profiling module that is not loaded, a watch that is refused, values
that are blank or old. All of it reads as "not given" and is tried again less and less often. Nothing here raises.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable

from carma.core.model.values import Activity, GpuId
from carma.monitor.backoff import BackOff
from carma.monitor.dcgmlib import UUID_FIELD, DcgmError, Entity, Library, Value, open_library
from carma.monitor.devices import Place

ADDRESS = "127.0.0.1"  # the host engine of this machine, at its usual port; never another machine's
CONNECT_MS = 1000
PERIOD_S = 1.0  # how often the host engine reads the counters for us
STALE_S = 5.0  # a value that is older says nothing about now
# dcgm_fields.h, DCGM_FI_PROF_*: each a mean over the host engine's last period, from 0 to 1.
FIELDS = {1002: "sm_active", 1003: "sm_occupancy", 1005: "dram_active", 1001: "gr_active", 1004: "tensor_active"}


class HostEngine:
    """One connection, made when it is needed and made again when it breaks. For one thread at a time."""

    def __init__(
        self,
        library: Callable[[], Library | None] = open_library,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._open_library, self._monotonic, self._wall = library, monotonic, wall
        self._library: Library | None = None
        self._handle: int | None = None
        self._watched: dict[Entity, Place] = {}
        self._attempts = 0  # makes the names of our groups unique within the host engine
        self._retry = BackOff(first_s=5.0, limit_s=600.0)
        self._tried = False
        self.problem: str | None = None  # why the last attempt did not give everything

    def read(self, places: Iterable[Place]) -> dict[Place, Activity]:
        """What is known of those places now. Places that are not watched yet are tried when a try is due."""
        wanted = set(places)
        if not wanted:
            return {}
        try:
            if not wanted <= set(self._watched.values()) and self._due():
                self._attempt(wanted)
            return self._values(wanted) if self._handle is not None else {}
        except DcgmError as error:
            self.problem = f"the DCGM host engine does not answer: {error}"
            self._hang_up()
            return {}

    def close(self) -> None:
        self._hang_up()
        if self._library is not None:
            self._library.close()
            self._library = None

    def _due(self) -> bool:
        if not self._tried:
            self._tried = True
            self._retry.due(self._monotonic())  # the wait for the next one begins
            return True
        return self._retry.due(self._monotonic())

    def _attempt(self, wanted: set[Place]) -> None:
        """Connect if need be, and watch what is not watched. Each card for itself: one refusal leaves the others."""
        self.problem = None
        if self._library is None:
            self._library = self._open_library()
        if self._library is None:
            self.problem = "there is no DCGM library (libdcgm.so.4 or .3)"
            return
        if self._handle is None:
            self._handle = self._library.connect(ADDRESS, CONNECT_MS)
        found = _find(self._library, self._handle, wanted - set(self._watched.values()))
        for card in sorted({place.card for place in found.values()}):
            self._watch({entity: place for entity, place in found.items() if place.card == card})
        if wanted <= set(self._watched.values()):
            self._retry.reset()
        elif self.problem is None:
            self.problem = "the DCGM host engine does not know all of the GPUs"

    def _watch(self, entities: dict[Entity, Place]) -> None:
        assert self._library is not None
        assert self._handle is not None
        self._attempts += 1
        name = f"carma-{os.getpid()}-{self._attempts}"
        try:
            self._library.watch(self._handle, name, list(entities), list(FIELDS), PERIOD_S)
        except DcgmError as error:
            self.problem = f"the DCGM host engine does not watch activity: {error}"
        else:
            self._watched |= entities

    def _values(self, wanted: set[Place]) -> dict[Place, Activity]:
        assert self._library is not None
        assert self._handle is not None
        entities = [entity for entity, place in self._watched.items() if place in wanted]
        if not entities:
            return {}
        oldest_us = (self._wall() - STALE_S) * 1e6
        figures: dict[Place, dict[str, float | None]] = {self._watched[entity]: {} for entity in entities}
        for value in self._library.latest(self._handle, entities, list(FIELDS)):
            if value.entity in self._watched and value.field in FIELDS:
                share = _share(value, oldest_us)
                figures[self._watched[value.entity]][FIELDS[value.field]] = share
        return {place: Activity(**given) for place, given in figures.items()}

    def _hang_up(self) -> None:
        handle, self._handle = self._handle, None
        self._watched = {}
        if handle is not None and self._library is not None:
            with contextlib.suppress(DcgmError):
                self._library.disconnect(handle)


def _find(library: Library, handle: int, wanted: set[Place]) -> dict[Entity, Place]:
    """DCGM's numbers of those places. They are the host engine's own, and change when it starts again."""
    found: dict[Entity, Place] = {}
    gpus = library.gpus(handle)
    if gpus:
        for value in library.latest(handle, gpus, [UUID_FIELD], live=True):
            place = Place(GpuId(str(value.value)))
            if value.status == 0 and place in wanted:
                found[value.entity] = place
    if any(place.instance is not None for place in wanted):
        with contextlib.suppress(DcgmError):  # no instances, then; a connection that is gone shows at the next call
            for uuid, instance, entity in library.instances(handle):
                place = Place(GpuId(uuid), instance)
                if place in wanted:
                    found[entity] = place
    return found


def _share(value: Value, oldest_us: float) -> float | None:
    """Blank values (not found, not supported, not permitted) are numbers from 2**47 on; see dcgm_structs.h."""
    if value.status != 0 or value.at_us < oldest_us or not isinstance(value.value, float):
        return None
    return min(1.0, value.value) if 0.0 <= value.value <= 1.1 else None
