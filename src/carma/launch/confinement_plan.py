"""How an attempt shares its GPUs, and what holds it there: decided for each order when it is launched.

The rungs, hardest first: MPS's own memory limit, a limit of its cgroup, its framework's limit, the watchdog behind them
all. A guard is listed only where it holds; what one would expect and does not get is said in the note.
"""

from __future__ import annotations

from typing import NamedTuple

from carma.core.model.settings import Sharing
from carma.core.model.values import Confinement, Guard, Mechanism
from carma.core.ports import LaunchOrder
from carma.errors import Refused
from carma.launch.cgroup_limits import CgroupLimits
from carma.launch.memory_caps import framework_caps, without_hoarding
from carma.launch.mps import MpsServers
from carma.launch.mps_control import PIPE_VARIABLE, MpsFailed

# CUDA joins whatever MPS answers in the default directory. A task that is to run beside others as a plain process must
# not end up under a server of the whole machine, which CARMA neither watches nor limits: nothing can answer here.
NO_MPS = {PIPE_VARIABLE: "/nonexistent/carma-mps"}
MEMORY_VARIABLE = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
THREADS_VARIABLE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
VIRTUAL_LIMIT_VARIABLE = "CARMA_VGPU_LIMIT_MIB"  # vgpu/virtual_task.py reads it


class Arranged(NamedTuple):
    confinement: Confinement
    environment: dict[str, str]  # wins over the submitter's
    server: str | None = None  # the name of the MPS server it runs under


class Way(NamedTuple):
    """The mechanism that was chosen, with what it takes and gives."""

    mechanism: Mechanism
    environment: dict[str, str]
    note: str = ""
    server: str | None = None


class Confiner:
    def __init__(self, sharing: Sharing, servers: MpsServers | None, limits: CgroupLimits | None = None) -> None:
        self.sharing = sharing
        self.servers = servers
        self.limits = limits

    def arrange(self, order: LaunchOrder) -> Arranged:
        """Starts an MPS server where one is needed. Raises Refused when it was asked for outright and cannot be had."""
        if not order.placement.gpus:
            return Arranged(Confinement(mechanism="timeslice"), dict(NO_MPS))
        way = self._way(order)
        environment, guards, notes = dict(way.environment), [], [way.note]
        if way.server is None and order.spec.threads_percent is not None:
            notes.append("its share of the SMs is not limited: only MPS can do that")
        cap_mib = order.placement.booking.cap_mib
        if order.placement.booking.alone or cap_mib is None:
            environment |= self._uncapped(order)
        else:
            more, rungs, note = self._capped(order, way, cap_mib)
            environment |= more
            guards += rungs
            notes.append(note)
        guards += self._watched(order)
        said = "; ".join(one for one in notes if one)
        confinement = Confinement(mechanism=way.mechanism, guards=tuple(guards), note=said)
        return Arranged(confinement, environment, way.server)

    # The mechanism.

    def _way(self, order: LaunchOrder) -> Way:
        wanted = order.spec.mechanism or self.sharing.mechanism
        kinds = {gpu.kind for gpu in order.gpus}
        if "virtual" in kinds:
            return Way("timeslice", dict(NO_MPS), "virtual GPUs have no MPS" if wanted == "mps" else "")
        if "mig" in kinds:
            return Way("mig", dict(NO_MPS), "MPS is not used on MIG instances" if wanted == "mps" else "")
        if wanted == "mig":
            raise Refused(
                "tasks of this server share MIG instances only (sharing.mechanism = mig), and its GPU is a whole card",
                "Ask the administrator for MIG instances, or for another sharing.mechanism.",
            )
        if wanted == "timeslice":
            return Way("timeslice", dict(NO_MPS))
        if wanted == "auto" and order.placement.booking.alone:
            return Way("timeslice", dict(NO_MPS), "it has its GPUs to itself, so MPS has nothing to give")
        return self._under_mps(order, wanted == "auto")

    def _under_mps(self, order: LaunchOrder, may_fall_back: bool) -> Way:
        try:
            if self.servers is None:
                raise MpsFailed("this server starts none")
            serving = self.servers.serve(order.owner)
        except MpsFailed as error:
            if may_fall_back:
                return Way("timeslice", dict(NO_MPS), f"MPS cannot be used: {error}")
            raise _refusal(order, str(error)) from error
        environment = serving.control.client_variables()
        if order.spec.threads_percent is not None:
            environment[THREADS_VARIABLE] = str(order.spec.threads_percent)
        return Way("mps", environment, server=serving.name)

    # What holds it.

    def _uncapped(self, order: LaunchOrder) -> dict[str, str]:
        """It has no limit, but unless it is alone it must not take the whole card for nothing either."""
        if order.placement.booking.alone or any(gpu.kind == "virtual" for gpu in order.gpus):
            return {}
        return without_hoarding(order.spec.environment)

    def _capped(self, order: LaunchOrder, way: Way, cap_mib: int) -> tuple[dict[str, str], list[Guard], str]:
        if any(gpu.kind == "virtual" for gpu in order.gpus):
            how = "the virtual GPU's own limit"
            guard = Guard(rung="framework", limit_mib=cap_mib, how=how)
            return {VIRTUAL_LIMIT_VARIABLE: str(cap_mib)}, [guard], ""
        environment: dict[str, str] = {}
        guards: list[Guard] = []
        if way.server is not None:
            # The places in this list are the client's own: its first visible GPU is 0, whatever its index elsewhere.
            places = range(len(order.placement.gpus))
            environment[MEMORY_VARIABLE] = ",".join(f"{place}={cap_mib}M" for place in places)
            guards.append(Guard(rung="mps", limit_mib=cap_mib, how="MPS's memory limit, for each process"))
        limited = self.limits.guard(order, cap_mib) if self.limits is not None else None
        if limited is not None:
            # The card then looks as small as the limit, and a framework's fraction would be one of that.
            return environment | without_hoarding(order.spec.environment), [*guards, limited], ""
        caps = framework_caps(order, cap_mib, self.sharing.context_mib)
        return environment | caps.environment, [*guards, *caps.guards], caps.note

    def _watched(self, order: LaunchOrder) -> list[Guard]:
        booking = order.placement.booking
        if not self.sharing.watchdog or booking.alone:
            return []
        how = "stopped when it takes what its neighbours have booked"
        return [Guard(rung="watchdog", limit_mib=booking.memory_mib, how=how)]


def needs_frameworks(order: LaunchOrder) -> bool:
    """Whether the limits of this attempt depend on the frameworks that its command imports."""
    booking = order.placement.booking
    virtual = any(gpu.kind == "virtual" for gpu in order.gpus)
    return bool(order.gpus) and booking.cap_mib is not None and not booking.alone and not virtual


def _refusal(order: LaunchOrder, why: str) -> Refused:
    if order.spec.mechanism == "mps":
        return Refused(
            f"the task asks for MPS, and MPS cannot be used: {why}",
            "Submit it without --mechanism mps; carma doctor says what MPS needs.",
        )
    return Refused(
        f"this server runs tasks under MPS only (sharing.mechanism = mps), and MPS cannot be used: {why}",
        "Ask the administrator; carma doctor says what MPS needs, and auto falls back to time slicing.",
    )
