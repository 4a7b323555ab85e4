"""Whether a task could ever run here; asked when it is submitted, so that nobody waits for the impossible."""

from __future__ import annotations

from carma.core.model.units import show_count, show_pair_mib
from carma.core.model.values import Gpu, TaskSpec
from carma.core.scheduling.verdicts import takes_tasks
from carma.core.state import State


def by_size(state: State) -> tuple[Gpu, ...]:
    """The GPUs that take tasks, largest first. Sorted once for each set of GPUs that was found."""
    if state.sized is not state.gpus:
        allowed = (gpu for gpu in state.gpus.values() if takes_tasks(gpu, state.rules))
        state.sizes = tuple(sorted(allowed, key=lambda gpu: (-gpu.memory_mib, gpu.index)))
        state.sized = state.gpus
    return state.sizes


def never_fits(state: State, spec: TaskSpec, gpus: tuple[Gpu, ...] | None = None) -> str | None:
    """A sentence that names the largest GPU, or None. `gpus` is `by_size(state)`, for those who ask often."""
    if gpus is None:
        gpus = by_size(state)
    if spec.gpus > len(gpus):
        return f"it asks for {show_count(spec.gpus, 'GPU')}; this server has {len(gpus)}" + _which(state, len(gpus))
    if spec.gpu_memory_mib is None or not gpus:
        return None
    if spec.gpu_memory_mib <= gpus[spec.gpus - 1].memory_mib:
        return None
    largest = gpus[0]
    asked, most = show_pair_mib(spec.gpu_memory_mib, largest.memory_mib)
    sentence = f"it asks for {asked} of GPU memory; the largest GPU here is GPU {largest.index} with {most}"
    return sentence if spec.gpus == 1 else f"{sentence}, and {spec.gpus} such GPUs are asked for"


def _which(state: State, found: int) -> str:
    """What keeps the others out."""
    if found == len(state.gpus):
        return ""
    if state.rules.sharing.mechanism == "mig":
        return " that take tasks (only MIG instances do: sharing.mechanism is mig)"
    return " that take tasks (placement.gpus)"
