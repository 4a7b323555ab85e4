"""One task a GPU, the way GPUs are handed out today; the baseline of every comparison."""

from __future__ import annotations

from collections.abc import Sequence

from carma.core.model.decision import Ask, Part
from carma.core.model.values import GpuId
from carma.core.scheduling.gpu_view import GpuView
from carma.core.scheduling.policy import Policy, Ranked


def rank(_ask: Ask, views: Sequence[GpuView], _last_gpu: GpuId | None) -> list[Ranked]:
    return [Ranked(view.gpu.id, (Part("order", -float(view.gpu.index)),)) for view in views]


POLICY = Policy("exclusive", rank, shares=False, about="One task a GPU; waits for an idle one.")
