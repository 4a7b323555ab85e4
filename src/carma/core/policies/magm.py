"""Most available GPU memory (MAGM): the GPU with the most room; the best of the published policies."""

from __future__ import annotations

from collections.abc import Sequence

from carma.core.model.decision import Ask, Part
from carma.core.model.values import GpuId
from carma.core.scheduling.gpu_view import GpuView
from carma.core.scheduling.policy import Policy, Ranked


def rank(_ask: Ask, views: Sequence[GpuView], _last_gpu: GpuId | None) -> list[Ranked]:
    ordered = sorted(views, key=lambda view: (-(view.room_mib or 0), view.gpu.index))
    return [Ranked(view.gpu.id, (Part("room_mib", float(view.room_mib or 0), "MiB"),)) for view in ordered]


POLICY = Policy("magm", rank, about="The GPU with the most room (most available GPU memory).")
