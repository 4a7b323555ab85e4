"""PyTorch's allocator options (`a:1,b:[64:8,>:1]`), split as its own tokeniser does, with a memory limit added.

The submitter's options stay as they are, character by character; only a memory fraction is replaced by a smaller one.
AllocatorOptions that cannot be read stay too: PyTorch refuses them with its usual message.
"""

from __future__ import annotations

import math
import re

from carma.core.model.values import Record

FRACTION = "per_process_memory_fraction"
_FIRST = (2, 10)  # the release that added it; pre-releases of 2.10 may be older than the option

_VERSION = re.compile(r"(\d+)\.(\d+)(?P<rest>.*)")
_PRERELEASE = re.compile(r"[0-9.]*(a|b|rc|\.dev)\d")


def has_fraction(version: str) -> bool:
    """Whether this PyTorch knows the option. False for an unknown version: PyTorch ends on an unknown option."""
    match = _VERSION.match(version)
    if match is None:
        return False
    release = (int(match[1]), int(match[2]))
    return release > _FIRST or (release == _FIRST and not _PRERELEASE.match(match["rest"]))


class AllocatorOptions(Record, frozen=True):
    """The options in order, unchanged."""

    items: tuple[str, ...]

    @classmethod
    def read(cls, text: str) -> AllocatorOptions:
        return cls(tuple(item for item in _split(text) if item.strip()))

    def value(self, key: str) -> str | None:
        """The last value of the option."""
        values = [item.partition(":")[2].strip() for item in self.items if item.partition(":")[0].strip() == key]
        return values[-1] if values else None

    def number(self, key: str) -> float | None:
        try:
            number = float(self.value(key) or "")
        except ValueError:
            return None
        return number if math.isfinite(number) and 0 <= number <= 1 else None

    def limited(self, fraction: float) -> str:
        """The options with at most this memory fraction."""
        theirs = self.number(FRACTION)
        if theirs is not None and theirs <= fraction:
            return ",".join(self.items)
        rest = [item for item in self.items if item.partition(":")[0].strip() != FRACTION]
        return ",".join((*rest, f"{FRACTION}:{fraction:.6f}"))


def _split(text: str) -> list[str]:
    """Split at commas that are not inside brackets."""
    items, depth = [""], 0
    for character in text:
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "," and depth <= 0:
            items.append("")
        else:
            items[-1] += character
    return items
