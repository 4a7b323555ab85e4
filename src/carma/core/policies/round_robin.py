"""Round robin (RR): the next GPU on a ring, after the one that took the last task."""

from __future__ import annotations

from collections.abc import Sequence

from carma.core.model.decision import Ask, Part
from carma.core.model.values import GpuId
from carma.core.scheduling.gpu_view import GpuView
from carma.core.scheduling.policy import Policy, Ranked


def rank(_ask: Ask, views: Sequence[GpuView], last_gpu: GpuId | None) -> list[Ranked]:
    after = sorted(views, key=lambda view: view.gpu.index)
    last = next((place for place, view in enumerate(after) if view.gpu.id == last_gpu), -1)
    ring = after[last + 1 :] + after[: last + 1]
    return [Ranked(view.gpu.id, (Part("turn", -float(place)),)) for place, view in enumerate(ring)]


POLICY = Policy("round-robin", rank, about="The next GPU on a ring (RR).")
