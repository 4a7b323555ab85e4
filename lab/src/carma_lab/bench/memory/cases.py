"""The cases that estimates are measured against: `python -m carma_lab.bench.memory.cases > cases.jsonl`.

Each model gets several settings, drawn by a seeded generator: image size or sequence length, precision, optimizer,
and a batch size that aims at a need between 1 and 22 GiB by a rough rule. The rule only spreads the cases over small
and large; nothing is estimated with it.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

FILE = Path(__file__).with_name("models.csv")
CASES_OF_A_FAMILY = 6  # at the least, for the families that are not our own
AIM_GIB = (0.8, 20.0)
MOST_PIXELS = 512 * 224 * 224  # of a batch: more takes the CPU longer to make than the GPU to learn from
MOST_TOKENS = 64 * 1024
PRECISIONS = {"fp32": 30, "strict": 10, "tf32": 12, "bf16-amp": 24, "fp16-amp": 14, "bf16": 10}
OPTIMIZERS = {
    "sgd": 10, "momentum": 16, "adam": 16, "adamw": 26, "adamw-fused": 12, "adamw-loop": 8, "rmsprop": 6, "adagrad": 6,
}  # fmt: skip
STATE_BYTES = {"sgd": 8, "momentum": 12, "rmsprop": 12, "adagrad": 12}  # for each weight, gradient included
ACTIVATIONS = {"bf16-amp": 0.62, "fp16-amp": 0.62, "bf16": 0.52, "strict": 1.5}  # beside fp32 as 1


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


class Case(msgspec.Struct, frozen=True):
    """One training run: the arguments of zoo/case.py. Estimates are reported on families that were left out."""

    id: str
    family: str
    argv: tuple[str, ...]


def all_cases(seed: int = 0) -> tuple[Case, ...]:
    """All cases, in the order of the models. The same seed gives the same cases, drawn independently per model."""
    cases = []
    for entry in LINEUP:
        chance = random.Random(f"{seed}/{entry.model}")
        seen: set[tuple[str, ...]] = set()
        while len(seen) < _count(entry):
            argv = _draw(entry, chance)
            if argv not in seen:
                cases.append(Case(f"{entry.model}.{len(seen)}", entry.family, argv))
                seen.add(argv)
    return tuple(cases)


def _count(entry: Entry) -> int:
    alike = sum(1 for other in LINEUP if other.family == entry.family)
    return max(entry.cases, -(-CASES_OF_A_FAMILY // alike) if not entry.model.startswith("own-") else 0)


def _draw(entry: Entry, chance: random.Random) -> tuple[str, ...]:
    weights = {name: weight for name, weight in PRECISIONS.items() if name not in entry.without}
    precision = chance.choices(list(weights), list(weights.values()))[0]
    optimizer = chance.choices(list(OPTIMIZERS), list(OPTIMIZERS.values()))[0]
    if precision == "fp16-amp" and optimizer == "adagrad":
        optimizer = "adamw"  # not used in practice
    length = chance.choice(entry.lengths) if entry.lengths else 0
    checkpoint = entry.checkpoint and chance.random() < 0.18
    batch = _batch(entry, chance, length, precision, optimizer, checkpoint)
    argv = ["--model", entry.model, "--batch", str(batch), "--optimizer", optimizer, "--precision", precision]
    if length:
        argv += ["--seq" if entry.per == "token" else "--size", str(length)]
    argv += ["--checkpoint"] * checkpoint
    argv += _extras(entry, chance, batch, precision)
    return tuple(argv)


def _batch(entry: Entry, chance: random.Random, length: int, precision: str, optimizer: str, checkpoint: bool) -> int:
    """The batch that brings the rough need near a drawn aim; a round number, as people choose them."""
    low, high = AIM_GIB
    aim_mib = 1024 * low * (high / low) ** chance.random()
    states_mib = entry.weights_m * STATE_BYTES.get(optimizer, 16) * (0.5 if precision == "bf16" else 1.0)
    each_mib = entry.scaled_mib(length) * ACTIVATIONS.get(precision, 1.0) * (0.5 if checkpoint else 1.0)
    wanted = max(aim_mib - states_mib, 0.15 * aim_mib) / each_mib
    if length and entry.per == "image":
        wanted = min(wanted, MOST_PIXELS / length**2)
    if length and entry.per == "token":
        wanted = min(wanted, MOST_TOKENS / length)
    return _round(min(wanted, entry.most), entry.least)


def _round(wanted: float, least: int) -> int:
    for step, above in ((256, 1024), (64, 256), (16, 64), (4, 16), (1, 0)):
        if wanted >= above:
            return max(least, int(wanted // step * step))
    return least


def _extras(entry: Entry, chance: random.Random, batch: int, precision: str) -> Iterator[str]:
    if entry.per == "image" and entry.channels_last and chance.random() < (0.35 if precision.endswith("amp") else 0.12):
        yield "--channels-last"
    if entry.padding and chance.random() < 0.5:
        yield "--padding"
    if chance.random() < 0.12:
        yield from ("--accumulate", str(chance.choice((2, 4))))
    if chance.random() < 0.2:
        yield from ("--clip", "1.0")
    if entry.evaluate and chance.random() < 0.1:
        yield from ("--eval-batch", str(batch * 2))
    if entry.per == "image" and chance.random() < 0.06:
        yield "--benchmark"


def main() -> None:
    for case in all_cases():
        print(json.dumps(msgspec.to_builtins(case)))


if __name__ == "__main__":
    main()
