"""Reads off what convolutions took in whole trainings: rows for `tools.fit_workspaces`, on standard output.

    python -m tools.workspace_rows TRUTH.json TRACES > rows.jsonl

TRUTH.json and the histories beside it come from `carma bench memory` on a card; TRACES has a trial run's report and
events for each case (`TRACES/<case>/report.json`). A trial shows the same allocations in the same order as the card,
but for what libraries took. So whatever the history has more, where a convolution was called, is its workspace.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from carma.bench.memory.zoo import history
from carma.estimate.trace.conv_shapes import DTYPES, OPS
from carma.estimate.trace.report import ALLOC, CALL, EVENTS, REPORT, Call, Report, read_events

Blocks = tuple[int, ...]
LOOK_AHEAD = 12  # allocations that have to agree for one way of reading to be better than another
BLOCKS_MOST = 3  # at one place
RESYNC = 60
LOST_MOST = 400
SMALL_BYTES = 1 << 16
ALLOCATIONS_MOST = 12_000  # three steps of all but the longest
AGREED = 0.6
DIRECTIONS = {"conv": "forward", "conv_input_grad": "dgrad", "conv_weight_grad": "wgrad"}


class Aligned:
    """A history beside a trial: places in both, and the blocks that only the history has."""

    def __init__(self, real: Sequence[int], ours: Sequence[int], calls: dict[int, list[int]]) -> None:
        self.real, self.ours, self.calls = real, ours, calls
        self.a = self.b = self.lost = 0

    def blocks(self) -> Iterator[tuple[int, Blocks]]:
        """(Place in the trial, what the history has more there) for each place with calls."""
        while self.a < len(self.real) and self.b < len(self.ours) and self.lost < LOST_MOST:
            here = self.b in self.calls
            more = max(range(BLOCKS_MOST + 1 if here else 1), key=lambda more: (self._agree(more), -more))
            if not self._agree(more):
                self.lost += 1
                if not self._resync():
                    return
                continue
            if here:
                yield self.b, tuple(self.real[self.a : self.a + more])
            self.a += more + 1
            self.b += 1

    def _agree(self, more: int) -> int:
        """How many of the next allocations are equal, up to the next call."""
        count = 0
        while count < LOOK_AHEAD and self._same(more + count, count):
            count += 1
            if self.b + count in self.calls:
                break
        return count

    def _same(self, ahead: int, behind: int) -> bool:
        a, b = self.a + ahead, self.b + behind
        return a < len(self.real) and b < len(self.ours) and self.real[a] == self.ours[b]

    def _resync(self) -> bool:
        for total in range(1, RESYNC):
            for ahead in range(total + 1):
                if all(self._same(ahead + step, total - ahead + step) for step in range(5)):
                    self.a, self.b = self.a + ahead, self.b + total - ahead
                    return True
        return False


def observed(folder: Path, events: Sequence[history.Event]) -> Iterator[tuple[Call, Counter[Blocks]]]:
    """Each convolution of a case, with how often it took which blocks."""
    report = msgspec.json.decode((folder / REPORT).read_bytes(), type=Report)
    if report.stop != "steps":
        return
    ours: list[int] = []
    calls: dict[int, list[int]] = defaultdict(list)
    for event in read_events((folder / EVENTS).read_bytes()):
        if event.kind == ALLOC:
            ours.append(event.bytes)
        elif event.kind == CALL:
            calls[len(ours)].append(event.what)
    real = [event.size for event in events if event.action == "alloc"]
    seen: dict[int, Counter[Blocks]] = defaultdict(Counter)
    for place, blocks in Aligned(real, ours[:ALLOCATIONS_MOST], dict(calls)).blocks():
        convolutions = [call for call in calls[place] if report.calls[call].op in OPS]
        if len(convolutions) == 1:
            seen[convolutions[0]][blocks] += 1
    for index, counts in seen.items():
        yield report.calls[index], counts


def row(call: Call, counts: Counter[Blocks], family: str) -> dict[str, Any] | None:
    """As a card's measuring writes it; None where the case does not say one figure."""
    image, weight, output = call.sizes
    rank = len(image) - 2
    often, times = counts.most_common(1)[0]
    benchmark = "benchmark" in call.flags
    if not benchmark and (times < AGREED * counts.total() or sum(size > SMALL_BYTES for size in often) > 1):
        return None
    taken = max((max(blocks, default=0) for blocks in counts), default=0) if benchmark else max(often, default=0)
    made = {
        "op": "convolution",
        "source": f"run:{family}",
        "n": image[0],
        "cin": image[1],
        "cout": output[1],
        "size": image[2:],
        "kernel": weight[2:],
        "stride": call.numbers[:rank],
        "padding": call.numbers[rank : 2 * rank],
        "dilation": call.numbers[2 * rank : 3 * rank],
        "groups": call.numbers[-1],
        "transposed": False,
        "dtype": DTYPES[call.dtype],
        "tf32": "tf32" in call.flags,
        "channels_last": "channels_last" in call.flags,
        "mode": "benchmark" if benchmark else "deterministic" if "deterministic" in call.flags else "default",
        "direction": DIRECTIONS[call.op],
        "out_bytes": 0,
        "peak_bytes": taken,
        "kept_bytes": 0,
        "backend": "Cudnn",
    }
    return {**made, "settled_bytes": max(often, default=0)} if benchmark and times > 1 else made


def rows(truth: Path, traces: Path) -> Iterator[dict[str, Any]]:
    files: dict[str, bytes] = {}
    for case in json.loads(truth.read_text())["rows"]:
        folder = traces / case["id"]
        if not (folder / REPORT).is_file():
            continue
        name, offset, length = case["history"]
        if name not in files:
            beside = (truth.parent / name, truth.parent.parent / name)
            files[name] = next(file.read_bytes() for file in beside if file.is_file())
        for call, counts in observed(folder, history.unpack(files[name][offset : offset + length])[1]):
            if call.dtype in DTYPES and (made := row(call, counts, case["family"])) is not None:
                yield made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("truth", type=Path)
    parser.add_argument("traces", type=Path)
    said = parser.parse_args()
    lines = (json.dumps(made, separators=(",", ":")) for made in rows(said.truth, said.traces))
    for line in dict.fromkeys(lines):
        print(line)


if __name__ == "__main__":
    main()
