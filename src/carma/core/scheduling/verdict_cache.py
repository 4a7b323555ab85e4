"""Cache of the GPUs' verdicts, from one scheduling pass to the next.

1. A GPU's candidate is kept until its version in the state increases, or until time alone changes its view.
2. The policy's objections (by requirement) are kept for as long as the same tasks are on the GPU in the same condition.

It changes no answer: a pass with an empty cache decides the same, and tests compare the two. It is no part of the
state. One cache serves one state.
"""

from __future__ import annotations

from typing import NamedTuple

from carma.core.model.values import Gpu, GpuId
from carma.core.scheduling.snapshot import same_until, view_of
from carma.core.scheduling.verdicts import Candidate, candidate_of
from carma.core.state import State


class _Entry(NamedTuple):
    version: int
    at: float  # when the view was built
    until: float  # it holds for questions from `at` to before then
    candidate: Candidate


class VerdictCache:
    def __init__(self) -> None:
        self._entries: dict[GpuId, _Entry] = {}
        self._of: tuple[object, ...] = ()  # what the entries were made from
        self._gpus: dict[GpuId, Gpu] | None = None  # the mapping that `_in_order` was made from
        self._in_order: list[Gpu] = []

    def candidates(self, state: State, now: float) -> list[Candidate]:
        """Every GPU as it is now, in index order."""
        made_from = (state, state.rules, state.policy)
        if not all(one is other for one, other in zip(made_from, self._of, strict=False)) or not self._of:
            self._of = made_from
            self._entries.clear()
        if state.gpus is not self._gpus:
            self._gpus = state.gpus
            self._in_order = sorted(state.gpus.values(), key=lambda gpu: gpu.index)
            self._entries = {gpu: entry for gpu, entry in self._entries.items() if gpu in state.gpus}
        return [self._candidate(state, gpu, now) for gpu in self._in_order]

    def _candidate(self, state: State, gpu: Gpu, now: float) -> Candidate:
        version, known = state.versions.get(gpu.id, 0), self._entries.get(gpu.id)
        if known is not None and known.version == version and (known.at == now or known.at <= now < known.until):
            return known.candidate
        view = view_of(state, gpu, now)
        objections = None
        if known is not None and state.policy.objection is not None and known.candidate.view.holders == view.holders:
            objections = known.candidate.objections
        candidate = candidate_of(view, state.rules, state.policy, objections)
        self._entries[gpu.id] = _Entry(version, now, same_until(state, view, now), candidate)
        return candidate
