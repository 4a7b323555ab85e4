"""What every part of the trial has: the options, its share of the time, and a line that tells how it goes."""

from __future__ import annotations

import time

from carma.core.model.values import Record

PARTS = ("tasks", "oom", "restart", "exclusive")
NOT_VIRTUAL = "virtual GPUs have no MPS"  # why something is skipped that nobody promised there


class Options(Record, frozen=True, kw_only=True):
    """What `carma bench gpu` can be told."""

    out: str = "."
    limit_s: float = 900.0
    parts: tuple[str, ...] = PARTS
    virtual: bool = False
    tasks: int = 20
    scale: float = 1.0  # shorter or longer tasks
    rungs: tuple[str, ...] = ()  # of the oom part; empty: all
    table: str = "lab/results/h200/interference-mps.json"  # each workload alone, for comparison; may be missing


class Stage:
    """One part's share of the time."""

    def __init__(self, name: str, options: Options, gpu_memory_mib: int, began: float, until: float) -> None:
        self.name = name
        self.options = options
        self.gpu_memory_mib = gpu_memory_mib  # of the first GPU
        self.until = until  # monotonic
        self._began = began
        self._said_at = float("-inf")

    @property
    def left_s(self) -> float:
        return self.until - time.monotonic()

    @property
    def over(self) -> bool:
        return self.left_s <= 0.0

    @property
    def too_little(self) -> str:
        """Why something is skipped for want of time."""
        return f"only {max(0.0, self.left_s):.0f} s were left"

    def say(self, text: str, every_s: float = 0.0) -> None:
        """With the seconds since the trial began; not more often than asked."""
        now = time.monotonic()
        if now - self._said_at >= every_s:
            self._said_at = now
            print(f"[{now - self._began:5.0f} s] {self.name}: {text}", flush=True)
