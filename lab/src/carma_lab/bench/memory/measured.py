"""Reads what training runs really took, as `zoo/truth.py` wrote it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from carma.errors import Usage

MIB = 1 << 20


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One run, in bytes. What the file says beyond this is of no use here."""

    id: str
    family: str
    argv: tuple[str, ...]
    footprint_peak: int
    reserved_peak: int
    allocated_peak: int

    @property
    def footprint_mib(self) -> float:
        return self.footprint_peak / MIB


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What it was measured on."""

    gpu: str | None = None
    torch: str = ""
    driver: str = ""
    date: str = ""


def read_truth(path: Path) -> tuple[Head, tuple[Measured, ...]]:
    """The runs that ended well, with a footprint and a step of the optimizer; a run again replaces the one before."""
    try:
        lines = path.read_bytes().splitlines()
        head = msgspec.json.decode(lines[0], type=Head) if lines else Head()
        found = {run.id: run for line in lines if (run := _run(line)) is not None}
    except OSError as error:
        raise Usage(f"{path} cannot be read: {error.strerror}", _HINT) from error
    except msgspec.MsgspecError as error:
        raise Usage(f"{path} is no file of measured runs: {error}", _HINT) from error
    if not found:
        raise Usage(f"{path} has no run that ended well", _HINT)
    return head, tuple(found.values())


_HINT = "`carma bench memory-truth` makes one; lab/results/h200/memory/truth.jsonl is ours."


def _run(line: bytes) -> Measured | None:
    found = msgspec.json.decode(line, type=dict[str, Any])
    if found.get("error") or not all(found.get(name) for name in ("id", "footprint_peak", "steps")):
        return None
    return msgspec.convert(found, Measured)


def drawn(runs: Sequence[Measured], first: int, seed: int) -> tuple[Measured, ...]:
    """At most `first` runs in an order drawn with the seed, so that an interrupted comparison has a fair sample."""
    shuffled = sorted(runs, key=lambda run: run.id)
    random.Random(seed).shuffle(shuffled)
    return tuple(shuffled[:first] if first else shuffled)
