"""Whose processes the samples show: the launcher knows those of its attempts, and the servers that they share through.

Walking through process trees costs more than a glance at a GPU's memory, so a glance asks again only when it shows a
process that the sample before it did not.
"""

from __future__ import annotations

from collections.abc import Sequence

from carma.core.model.values import AttemptKey, GpuSample
from carma.daemon.executor import Hands
from carma.monitor.processes import attribute


class Whose:
    def __init__(self, hands: Hands) -> None:
        self._hands = hands
        self._pids: dict[int, AttemptKey] = {}
        self._servers: frozenset[int] = frozenset()
        self._seen: frozenset[int] = frozenset()  # all that were listed when the launcher was last asked

    async def attributed(self, samples: tuple[GpuSample, ...], keys: Sequence[AttemptKey]) -> tuple[GpuSample, ...]:
        """The samples with the attempt of each process filled in, by what the launcher says now."""
        self._pids, self._servers = await self._hands.with_launcher(lambda: self._ask(keys))
        self._seen = _listed(samples)
        return attribute(samples, self._pids, self._servers)

    async def known(self, samples: tuple[GpuSample, ...], keys: Sequence[AttemptKey]) -> tuple[GpuSample, ...]:
        """The same by what it said last, as long as that covers all that is shown."""
        if _listed(samples) <= self._seen:
            return attribute(samples, self._pids, self._servers)
        return await self.attributed(samples, keys)

    def _ask(self, keys: Sequence[AttemptKey]) -> tuple[dict[int, AttemptKey], frozenset[int]]:
        launcher = self._hands.launcher
        return launcher.pids(keys) if keys else {}, launcher.sharing_pids()


def _listed(samples: Sequence[GpuSample]) -> frozenset[int]:
    return frozenset(use.pid for sample in samples for use in sample.processes or ())
