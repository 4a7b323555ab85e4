"""The cards that an estimate can be asked for without having one: names, memory, compute capability.

`memory_mib` is what a process finds (CUDA's total, below the figure on the box). Drivers differ by some tens of MiB, so
it is the smaller of those that were seen; for a card of this machine the driver's own figure is used instead. That of
the H200 was measured, the others are as PyTorch names them in public error messages.
"""

from __future__ import annotations

import difflib
import re

from carma.core.model.values import Gpu, GpuId, Record
from carma.errors import NotFound

DEFAULT = "h200"


class Card(Record, frozen=True, kw_only=True):
    """One model. `name` is NVML's; `alias` is what one types, and other spellings come after it."""

    name: str
    alias: str
    others: tuple[str, ...] = ()
    memory_mib: int
    capability: tuple[int, int]
    multiprocessors: int


def _card(name: str, spellings: str, memory_mib: int, capability: tuple[int, int], multiprocessors: int) -> Card:
    alias, *others = spellings.split(", ")
    return Card(
        name=name,
        alias=alias,
        others=tuple(others),
        memory_mib=memory_mib,
        capability=capability,
        multiprocessors=multiprocessors,
    )


CARDS: tuple[Card, ...] = (
    _card("Tesla T4", "t4", 14_930, (7, 5), 40),
    _card("Tesla V100-SXM2-16GB", "v100-16gb, v100, v100-sxm2-16gb, v100-pcie-16gb", 16_144, (7, 0), 80),
    _card("Tesla V100-SXM2-32GB", "v100-32gb, v100-sxm2-32gb, v100-pcie-32gb", 32_480, (7, 0), 80),
    _card("NVIDIA GeForce RTX 2080 Ti", "rtx2080ti, 2080ti, 2080-ti, rtx-2080ti", 11_008, (7, 5), 68),
    _card("NVIDIA GeForce RTX 3090", "rtx3090, 3090", 24_100, (8, 6), 82),
    _card("NVIDIA GeForce RTX 4090", "rtx4090, 4090", 24_080, (8, 9), 128),
    _card("NVIDIA GeForce RTX 5090", "rtx5090, 5090", 32_100, (12, 0), 170),
    _card("NVIDIA A10", "a10", 22_500, (8, 6), 72),
    _card("NVIDIA A10G", "a10g", 22_500, (8, 6), 80),
    _card("NVIDIA A30", "a30", 24_060, (8, 0), 56),
    _card("NVIDIA A40", "a40", 45_450, (8, 6), 84),
    _card(
        "NVIDIA A100-SXM4-40GB", "a100-40gb, a100-40, a100-sxm4-40gb, a100-sxm-40gb, a100-sxm-40", 40_330, (8, 0), 108
    ),
    _card("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb, a100-pcie-40", 40_330, (8, 0), 108),
    _card(
        "NVIDIA A100-SXM4-80GB",
        "a100-80gb, a100, a100-80, a100-sxm4-80gb, a100-sxm-80gb, a100-sxm-80",
        81_000,
        (8, 0),
        108,
    ),
    _card("NVIDIA A100 80GB PCIe", "a100-pcie-80gb, a100-80gb-pcie, a100-pcie-80", 81_000, (8, 0), 108),
    _card("NVIDIA RTX A6000", "a6000, rtx-a6000", 48_530, (8, 6), 84),
    _card("NVIDIA RTX 6000 Ada Generation", "6000-ada, rtx-6000-ada, rtx6000ada, 6000ada", 48_500, (8, 9), 142),
    _card("NVIDIA L4", "l4", 22_480, (8, 9), 58),
    _card("NVIDIA L40S", "l40s", 45_450, (8, 9), 142),
    _card("NVIDIA H100 PCIe", "h100-pcie, h100-80gb-pcie", 80_990, (9, 0), 114),
    _card("NVIDIA H100 80GB HBM3", "h100, h100-sxm, h100-sxm5, h100-80gb", 80_990, (9, 0), 132),
    _card("NVIDIA H200", "h200, h200-sxm, h200-141gb", 143_155, (9, 0), 132),
    _card("NVIDIA B200", "b200", 182_600, (10, 0), 148),
    _card("NVIDIA GH200 480GB", "gh200, gh200-96gb", 96_700, (9, 0), 132),
)


def card_for(name: str) -> Card | None:
    """The model behind the name of a GPU as its driver gives it; of a MIG instance, that of its card.

    Words after a known name say how the card is built or cut ("NVIDIA H200 NVL", "... MIG 3g.40gb"): the model that
    shares the most words with it answers. A name that only begins alike ("L40" and "L4") is another model.
    """
    words = _words(name)
    best: tuple[int, Card] | None = None
    for card in CARDS:
        for spelled in (card.name, card.alias, *card.others):
            own = _words(spelled)
            if words[: len(own)] == own and (best is None or len(own) > best[0]):
                best = (len(own), card)
    return None if best is None else best[1]


def find_card(text: str) -> Card | None:
    """The model that a user typed: its name or one of its spellings, whole."""
    words = _words(text)
    for card in CARDS:
        if any(_words(spelled) == words for spelled in (card.name, card.alias, *card.others)):
            return card
    return None


def unknown_card(text: str) -> NotFound:
    """What is said about a name that is no card's."""
    known = [card.alias for card in CARDS]
    spellings = {spelled: card.alias for card in CARDS for spelled in (card.alias, *card.others)}
    near = difflib.get_close_matches("-".join(_words(text)), spellings, n=1)
    nearest = f"Did you mean {spellings[near[0]]}? " if near else ""
    return NotFound(
        f"there is no GPU {text!r}",
        f"{nearest}Known are {', '.join(known)}, and this machine's GPUs by index or UUID.",
    )


def as_gpu(card: Card, index: int = 0) -> Gpu:
    """The card as if it were in this machine, for a request to an estimator."""
    return Gpu(id=GpuId(f"GPU-catalogue-{card.alias}-{index}"), index=index, name=card.name, memory_mib=card.memory_mib)


def _words(name: str) -> list[str]:
    """`NVIDIA A100-SXM4-80GB` and `a100 sxm4 80gb` are one; makers' and brands' words say nothing."""
    words = re.findall(r"[a-z0-9.]+", name.lower())
    return [word for word in words if word not in ("nvidia", "tesla", "geforce", "quadro", "graphics", "device")]
