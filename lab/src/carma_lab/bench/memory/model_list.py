"""The models of the zoo (models.csv): family, rough size, and which settings they support.

`each_mib` is what one sample (or one token) roughly adds in fp32 at the reference length, `weights_m` the number of
weights in millions. Both were estimated, not measured: they only spread the batch sizes.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

FILE = Path(__file__).with_name("models.csv")


class Entry(msgspec.Struct, frozen=True):
    """`lengths` are image sizes or sequence lengths; `most` and `least` limit the batch size.

    Detection models pad and resize their images themselves, do not work in pure bf16, and return boxes in evaluation.
    """

    model: str
    family: str
    each_mib: float
    weights_m: float
    lengths: tuple[int, ...]
    reference: int
    per: Literal["image", "volume", "signal", "token", "row"]
    cases: int
    checkpoint: bool
    channels_last: bool
    padding: bool
    evaluate: bool
    without: tuple[str, ...]
    most: int
    least: int

    def scaled_mib(self, length: int) -> float:
        """What one sample adds at this length: images by area, volumes by content, signals and tokens in line."""
        power = {"image": 2, "volume": 3, "signal": 1, "token": 1, "row": 0}[self.per]
        if not length:
            return self.each_mib
        return self.each_mib * (length / self.reference) ** power


def _entries() -> Iterator[Entry]:
    lines = [line for line in FILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    for row in csv.DictReader(lines):
        cells: dict[str, Any] = dict(row)
        cells |= {name: row[name].split() for name in ("lengths", "without")}
        cells |= {name: row[name] == "yes" for name in ("checkpoint", "channels_last", "padding", "evaluate")}
        yield msgspec.convert(cells, Entry, strict=False)


LINEUP: tuple[Entry, ...] = tuple(_entries())
