"""Where one more sample could make a difference. A GPU to which nobody can come, or that nobody uses, need not be
looked at every few seconds: who may come to it depends on who is there, and a sample that shows the same tasks as the
one before tells nothing that the core acts on. Nothing is decided here, and no more is known than the core knows.
"""

from __future__ import annotations

from carma.core.model.values import GpuId
from carma.core.state import State


def heeded(state: State, gpu: GpuId, used: bool) -> bool:
    """Whether the core could do something else for a sample that shows the same tasks on the GPU as the last one.
    `used`: whether that showed any."""
    rules = state.rules
    if rules.sharing.watchdog or rules.preemption.enabled:
        return True  # then samples end tasks, or move them
    if not state.policy.shares:
        return False  # nobody comes before the one that is there has left
    # Those on it settle, and what they show, or do not show yet, is at the gate. One that nobody is on is idle,
    # whatever its window says.
    return used or bool(state.on_gpu.get(gpu))
