"""First fit (FF): the first GPU, in index order, that can take the task."""

from __future__ import annotations

from collections.abc import Sequence

from carma.core.model.decision import Ask, Part
from carma.core.model.values import GpuId
from carma.core.scheduling.gpu_view import GpuView
from carma.core.scheduling.policy import Policy, Ranked


def rank(_ask: Ask, views: Sequence[GpuView], _last_gpu: GpuId | None) -> list[Ranked]:
    ordered = sorted(views, key=lambda view: view.gpu.index)
    return [Ranked(view.gpu.id, (Part("order", -float(view.gpu.index)),)) for view in ordered]


POLICY = Policy("first-fit", rank, about="The first GPU that can take it (FF).")
