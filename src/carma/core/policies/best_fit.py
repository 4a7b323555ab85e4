"""Best fit (BF): the GPU with the least room that is still enough, so that large gaps stay whole."""

from __future__ import annotations

from collections.abc import Sequence

from carma.core.model.decision import Ask, Part
from carma.core.model.values import GpuId
from carma.core.scheduling.gpu_view import GpuView
from carma.core.scheduling.policy import Policy, Ranked


def rank(ask: Ask, views: Sequence[GpuView], _last_gpu: GpuId | None) -> list[Ranked]:
    ordered = sorted(views, key=lambda view: (view.room_mib or 0, view.gpu.index))
    return [
        Ranked(view.gpu.id, (Part("left_mib", float(ask.memory_mib - (view.room_mib or 0)), "MiB"),))
        for view in ordered
    ]


POLICY = Policy("best-fit", rank, about="The GPU with the least room that is enough (BF).")
