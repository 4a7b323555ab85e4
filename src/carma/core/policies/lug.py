"""Least utilised GPU (LUG): the lowest SM activity, by the published risk value; more room decides a tie."""

from __future__ import annotations

from collections.abc import Sequence

from carma.core.model.decision import Ask, Part
from carma.core.model.values import GpuId
from carma.core.scheduling.gpu_view import GpuView
from carma.core.scheduling.policy import Policy, Ranked


def _risk(view: GpuView) -> float:
    """An unknown activity counts as the worst; a GPU without tasks and processes is idle whatever its window says."""
    if view.idle:
        return 0.0
    found = view.gauge("sm_active", "risk")
    return 1.0 if found is None else found


def rank(_ask: Ask, views: Sequence[GpuView], _last_gpu: GpuId | None) -> list[Ranked]:
    ordered = sorted(views, key=lambda view: (_risk(view), -(view.room_mib or 0), view.gpu.index))
    return [
        Ranked(
            view.gpu.id,
            (Part("sm_free", round(1 - _risk(view), 4)), Part("room_mib", float(view.room_mib or 0), "MiB")),
        )
        for view in ordered
    ]


POLICY = Policy("lug", rank, about="The GPU with the lowest SM activity (least utilised).")
