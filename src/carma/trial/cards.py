"""The catalogue of GPU models (`cards.json`) for estimates without such a GPU: names, memory, capability, rates.

`memory_mib` is CUDA's total, which is below the nominal size. Drivers differ by some tens of MiB; the table has the
smallest published value, and for a GPU of this machine the driver's own figure is used instead. The value of the H200
was measured; the others are from PyTorch's error messages in public reports. Rates are from data sheets.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import msgspec

from carma.core.model.values import Gpu, GpuId, Record
from carma.errors import NotFound

DEFAULT = "h200"


class Card(Record, frozen=True):
    """One model."""

    names: tuple[str, ...]  # the driver's, then those that users type, the usual one first
    memory_mib: int
    capability: tuple[int, int]
    multiprocessors: int
    peaks_tflops: tuple[float, ...] = ()  # dense: fp32, TF32, half precision; empty where no rates are known
    dram_gbs: float = 0.0
    # (a, b, c) of the power 1 - exp(-(a * SM + b * DRAM) ** c), with activities, if it is not that of an H200. That of
    # the A100 is from carma_lab/simulator/simulated_cards.py, from published means of tasks alone.
    power_curve: tuple[float, float, float] | None = None

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def alias(self) -> str:
        return self.names[1]


CARDS = msgspec.json.decode(Path(__file__).with_name("cards.json").read_bytes(), type=tuple[Card, ...])


def card_for(name: str) -> Card | None:
    """The model for the name that a driver reports; for a MIG instance, the model of its GPU.

    Words after a known name are variants ("NVIDIA H200 NVL", "... MIG 3g.40gb"): the model with the most common words
    is returned. A name with the same first letters ("L40" and "L4") is another model.
    """
    words = _words(name)
    found = [(len(own), card) for card in CARDS for own in map(_words, card.names) if words[: len(own)] == own]
    return max(found, key=lambda each: each[0])[1] if found else None


def find_card(text: str) -> Card | None:
    """The model with this name or spelling, which must match as a whole."""
    words = _words(text)
    return next((card for card in CARDS if words in map(_words, card.names)), None)


def unknown_card(text: str) -> NotFound:
    """The error for a name that is not a model."""
    known = [card.alias for card in CARDS]
    spellings = {spelled: card.alias for card in CARDS for spelled in card.names[1:]}
    near = difflib.get_close_matches("-".join(_words(text)), spellings, n=1)
    nearest = f"Did you mean {spellings[near[0]]}? " if near else ""
    return NotFound(
        f"{text!r} is not a known GPU model",
        f"{nearest}Known models: {', '.join(known)}. The GPUs of this machine are selected by index or UUID.",
    )


def as_gpu(card: Card, index: int = 0) -> Gpu:
    """A GPU of this model as if it were in this machine, for a request to an estimator."""
    return Gpu(id=GpuId(f"GPU-catalogue-{card.alias}-{index}"), index=index, name=card.name, memory_mib=card.memory_mib)


def _words(name: str) -> list[str]:
    """`NVIDIA A100-SXM4-80GB` and `a100 sxm4 80gb` are the same; words of vendors and brands are dropped."""
    words = re.findall(r"[a-z0-9.]+", name.lower())
    return [word for word in words if word not in ("nvidia", "tesla", "geforce", "quadro", "graphics", "device")]
