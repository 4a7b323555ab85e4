"""For which GPU an estimate is: a model by its name, or a GPU of this machine."""

from __future__ import annotations

from msgspec.structs import replace

from carma.cli.checks.machine_facts import Look
from carma.cli.error_output import note
from carma.core.model.values import Gpu, GpuId
from carma.errors import NotFound
from carma.trial.cards import DEFAULT, Card, as_gpu, find_card, unknown_card


def target_gpus(wanted: str | None, count: int) -> tuple[Gpu, ...]:
    """So many of it. A GPU that is here is asked for its memory; a model's is in the catalogue."""
    card = None if wanted is None else find_card(wanted)
    if card is not None:
        return tuple(as_gpu(card, index) for index in range(count))
    here = Look().found.gpus
    if wanted is None:
        return _copies(here[0], count) if here else _of_default(count)
    chosen = next((gpu for gpu in here if _is_meant(gpu, wanted)), None)
    if chosen is None:
        raise _unknown(wanted, here)
    return _copies(chosen, count)


def _is_meant(gpu: Gpu, wanted: str) -> bool:
    """By index, by UUID or its beginning (as CUDA_VISIBLE_DEVICES has it), or by the driver's name for it."""
    is_uuid = wanted.startswith(("GPU-", "MIG-")) and len(wanted) > 4 and gpu.id.startswith(wanted)
    return is_uuid or wanted == str(gpu.index) or wanted.casefold() == gpu.name.casefold()


def _copies(gpu: Gpu, count: int) -> tuple[Gpu, ...]:
    """As many of its kind, whether they are here or not: the question is what the command would take."""
    more = (replace(gpu, id=GpuId(f"{gpu.id}-{index}"), index=gpu.index + index) for index in range(1, count))
    return (gpu, *more)


def _of_default(count: int) -> tuple[Gpu, ...]:
    card = find_card(DEFAULT)
    assert isinstance(card, Card)
    note(f"this machine has no GPU that can be asked: the estimate is for an {card.name} (--gpu names another)")
    return tuple(as_gpu(card, index) for index in range(count))


def _unknown(wanted: str, here: tuple[Gpu, ...]) -> NotFound:
    if not (wanted.isdigit() or wanted.startswith(("GPU-", "MIG-"))):
        return unknown_card(wanted)
    listed = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in here)
    return NotFound(
        f"there is no GPU {wanted} on this machine",
        f"There are {listed}." if listed else "It has no GPU; --gpu also takes a model's name: --gpu h200.",
    )
