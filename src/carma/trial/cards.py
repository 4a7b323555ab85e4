"""The catalogue of GPU models for estimates without such a GPU: names, memory, compute capability.

`memory_mib` is CUDA's total, which is below the nominal size. Drivers differ by some tens of MiB; the table has the
smallest published value, and for a GPU of this machine the driver's own figure is used instead. The value of the H200
was measured; the others are from PyTorch's error messages in public reports.
"""

from __future__ import annotations

import difflib
import re

from carma.core.model.values import Gpu, GpuId, Record
from carma.errors import NotFound

DEFAULT = "h200"


class Card(Record, frozen=True):
    """One model. `name` is NVML's; `spellings` are what users type, the usual one first."""

    name: str
    spellings: str  # separated by ", "
    memory_mib: int
    capability: tuple[int, int]
    multiprocessors: int

    @property
    def alias(self) -> str:
        return self.names()[1]

    def names(self) -> list[str]:
        """All names, the driver's first."""
        return [self.name, *self.spellings.split(", ")]


CARDS: tuple[Card, ...] = (
    Card("Tesla T4", "t4", 14_930, (7, 5), 40),
    Card("Tesla V100-SXM2-16GB", "v100-16gb, v100, v100-sxm2-16gb, v100-pcie-16gb", 16_144, (7, 0), 80),
    Card("Tesla V100-SXM2-32GB", "v100-32gb, v100-sxm2-32gb, v100-pcie-32gb", 32_480, (7, 0), 80),
    Card("NVIDIA GeForce RTX 2080 Ti", "rtx2080ti, 2080ti, 2080-ti, rtx-2080ti", 11_008, (7, 5), 68),
    Card("NVIDIA GeForce RTX 3090", "rtx3090, 3090", 24_100, (8, 6), 82),
    Card("NVIDIA GeForce RTX 4090", "rtx4090, 4090", 24_080, (8, 9), 128),
    Card("NVIDIA GeForce RTX 5090", "rtx5090, 5090", 32_100, (12, 0), 170),
    Card("NVIDIA A10", "a10", 22_500, (8, 6), 72),
    Card("NVIDIA A10G", "a10g", 22_500, (8, 6), 80),
    Card("NVIDIA A30", "a30", 24_060, (8, 0), 56),
    Card("NVIDIA A40", "a40", 45_450, (8, 6), 84),
    Card(
        "NVIDIA A100-SXM4-40GB", "a100-40gb, a100-40, a100-sxm4-40gb, a100-sxm-40gb, a100-sxm-40", 40_330, (8, 0), 108
    ),
    Card("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb, a100-pcie-40", 40_330, (8, 0), 108),
    Card(
        "NVIDIA A100-SXM4-80GB",
        "a100-80gb, a100, a100-80, a100-sxm4-80gb, a100-sxm-80gb, a100-sxm-80",
        81_000,
        (8, 0),
        108,
    ),
    Card("NVIDIA A100 80GB PCIe", "a100-pcie-80gb, a100-80gb-pcie, a100-pcie-80", 81_000, (8, 0), 108),
    Card("NVIDIA RTX A6000", "a6000, rtx-a6000", 48_530, (8, 6), 84),
    Card("NVIDIA RTX 6000 Ada Generation", "6000-ada, rtx-6000-ada, rtx6000ada, 6000ada", 48_500, (8, 9), 142),
    Card("NVIDIA L4", "l4", 22_480, (8, 9), 58),
    Card("NVIDIA L40S", "l40s", 45_450, (8, 9), 142),
    Card("NVIDIA H100 PCIe", "h100-pcie, h100-80gb-pcie", 80_990, (9, 0), 114),
    Card("NVIDIA H100 80GB HBM3", "h100, h100-sxm, h100-sxm5, h100-80gb", 80_990, (9, 0), 132),
    Card("NVIDIA H200", "h200, h200-sxm, h200-141gb", 143_155, (9, 0), 132),
    Card("NVIDIA B200", "b200", 182_600, (10, 0), 148),
    Card("NVIDIA GH200 480GB", "gh200, gh200-96gb", 96_700, (9, 0), 132),
)


def card_for(name: str) -> Card | None:
    """The model for the name that a driver reports; for a MIG instance, the model of its GPU.

    Words after a known name are variants ("NVIDIA H200 NVL", "... MIG 3g.40gb"): the model with the most common words
    is returned. A name with the same first letters ("L40" and "L4") is another model.
    """
    words = _words(name)
    best: tuple[int, Card] | None = None
    for card in CARDS:
        for spelled in card.names():
            own = _words(spelled)
            if words[: len(own)] == own and (best is None or len(own) > best[0]):
                best = (len(own), card)
    return None if best is None else best[1]


def find_card(text: str) -> Card | None:
    """The model that a user typed: its name or one of its spellings, whole."""
    words = _words(text)
    for card in CARDS:
        if any(_words(spelled) == words for spelled in card.names()):
            return card
    return None


def unknown_card(text: str) -> NotFound:
    """The error for a name that is no model's."""
    known = [card.alias for card in CARDS]
    spellings = {spelled: card.alias for card in CARDS for spelled in card.names()[1:]}
    near = difflib.get_close_matches("-".join(_words(text)), spellings, n=1)
    nearest = f"Did you mean {spellings[near[0]]}? " if near else ""
    return NotFound(
        f"there is no GPU {text!r}",
        f"{nearest}Known are {', '.join(known)}, and this machine's GPUs by index or UUID.",
    )


def as_gpu(card: Card, index: int = 0) -> Gpu:
    """A GPU of this model as if it were in this machine, for a request to an estimator."""
    return Gpu(id=GpuId(f"GPU-catalogue-{card.alias}-{index}"), index=index, name=card.name, memory_mib=card.memory_mib)


def _words(name: str) -> list[str]:
    """`NVIDIA A100-SXM4-80GB` and `a100 sxm4 80gb` are the same; words of vendors and brands are dropped."""
    words = re.findall(r"[a-z0-9.]+", name.lower())
    return [word for word in words if word not in ("nvidia", "tesla", "geforce", "quadro", "graphics", "device")]
