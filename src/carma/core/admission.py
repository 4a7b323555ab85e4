"""Whether a task could ever run here; asked when it is submitted, so that nobody waits for the impossible."""

from __future__ import annotations

from carma.core.model import TaskSpec
from carma.core.state import State
from carma.core.units import show_mib


def never_fits(state: State, spec: TaskSpec) -> str | None:
    """A sentence that names the largest GPU, or None."""
    allowed = state.rules.placement.gpus
    gpus = [gpu for gpu in state.gpus.values() if not allowed or gpu.id in allowed or str(gpu.index) in allowed]
    if spec.gpus > len(gpus):
        return f"it asks for {spec.gpus} GPUs; this server has {len(gpus)}"
    if spec.gpu_memory_mib is None or not gpus:
        return None
    by_size = sorted(gpus, key=lambda gpu: (-gpu.memory_mib, gpu.index))
    smallest_of_largest = by_size[spec.gpus - 1]
    if spec.gpu_memory_mib <= smallest_of_largest.memory_mib:
        return None
    largest = by_size[0]
    sentence = (
        f"it asks for {show_mib(spec.gpu_memory_mib)} of GPU memory; "
        f"the largest GPU here is GPU {largest.index} with {show_mib(largest.memory_mib)}"
    )
    return sentence if spec.gpus == 1 else f"{sentence}, and {spec.gpus} such GPUs are asked for"
