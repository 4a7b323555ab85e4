"""Whether a task could ever run here: checked when it is submitted, and whenever the GPUs change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from carma.core.model.settings import Rules
from carma.core.model.units import show_count, show_pair_mib
from carma.core.model.values import Gpu, TaskSpec
from carma.core.scheduling.verdicts import takes_tasks


def usable(gpus: Iterable[Gpu], rules: Rules) -> tuple[Gpu, ...]:
    """The GPUs that take tasks, largest first."""
    allowed = (gpu for gpu in gpus if takes_tasks(gpu, rules))
    return tuple(sorted(allowed, key=lambda gpu: (-gpu.memory_mib, gpu.index)))


def never_fits(spec: TaskSpec, gpus: Sequence[Gpu], found: int, rules: Rules) -> str | None:
    """A sentence that names the largest GPU, or None. `gpus`: those that are usable; `found`: how many there are."""
    if spec.gpus > len(gpus):
        asked = f"it asks for {show_count(spec.gpus, 'GPU')}; this server has {len(gpus)}"
        return asked + ("" if found == len(gpus) else _which(rules))
    if spec.gpu_memory_mib is None or not gpus:
        return None
    if spec.gpu_memory_mib <= gpus[spec.gpus - 1].memory_mib:
        return None
    largest = gpus[0]
    needs, most = show_pair_mib(spec.gpu_memory_mib, largest.memory_mib)
    sentence = f"it asks for {needs} of GPU memory; the largest GPU here is GPU {largest.index} with {most}"
    return sentence if spec.gpus == 1 else f"{sentence}, and {spec.gpus} such GPUs are asked for"


def _which(rules: Rules) -> str:
    """What keeps the other GPUs out."""
    if rules.sharing.mechanism == "mig":
        return " that take tasks (only MIG instances do: sharing.mechanism is mig)"
    return " that take tasks (placement.gpus)"
