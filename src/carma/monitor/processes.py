"""Attribution of the processes that the driver lists to attempts. Pure.

The launcher knows the descendants of each attempt. They are matched by pid, MPS clients included; the sampler has
translated the pids into this machine's namespace if necessary (`process_listing.translation`). A process that descends
from no attempt (a container that a service started, a daemon that left its session) stays foreign.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from carma.core.model.values import AttemptKey, GpuId, GpuSample, Placement, ProcessUse, Record


class Stray(Record, frozen=True, kw_only=True):
    """A process of an attempt on a GPU outside the attempt's placement."""

    attempt: AttemptKey
    pid: int
    gpu: GpuId
    given: tuple[GpuId, ...]

    def __str__(self) -> str:
        given = ", ".join(self.given) or "no GPU"
        return f"process {self.pid} of task {self.attempt.task} runs on {self.gpu}; it was given {given}"


def attribute(
    samples: Iterable[GpuSample], pids: Mapping[int, AttemptKey], ours: Collection[int] = frozenset()
) -> tuple[GpuSample, ...]:
    """The same samples with `attempt` filled in by pid. A process that is not in `pids` stays foreign.

    `ours` are processes that serve attempts and belong to none (MPS servers): their entries are removed, so that they
    do not count as foreign work. Their memory still counts in the GPU's `memory_used_mib`.
    """
    return tuple(_attribute_one(sample, pids, ours) for sample in samples)


def strays(samples: Iterable[GpuSample], placements: Mapping[AttemptKey, Placement]) -> tuple[Stray, ...]:
    """Attributed processes on GPUs outside their attempt's placement. Attempts without a placement are left out."""
    return tuple(
        Stray(attempt=process.attempt, pid=process.pid, gpu=sample.gpu, given=placements[process.attempt].gpus)
        for sample in samples
        for process in sample.processes or ()
        if process.attempt is not None
        and process.attempt in placements
        and sample.gpu not in placements[process.attempt].gpus
    )


def _attribute_one(sample: GpuSample, pids: Mapping[int, AttemptKey], ours: Collection[int]) -> GpuSample:
    known = sample.processes or ()
    if not any(process.pid in pids or process.pid in ours for process in known):
        return sample
    kept = tuple(_own(process, pids) for process in known if process.pid not in ours or process.pid in pids)
    return msgspec.structs.replace(sample, processes=kept)


def _own(process: ProcessUse, pids: Mapping[int, AttemptKey]) -> ProcessUse:
    attempt = pids.get(process.pid)
    return process if attempt is None else msgspec.structs.replace(process, attempt=attempt)
