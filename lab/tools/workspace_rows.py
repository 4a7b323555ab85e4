"""Extracts the workspaces of convolutions from whole training runs: rows for `lab.tools.fit_workspaces`, on standard
output.

    python -m lab.tools.workspace_rows truth.jsonl TRACES > rows.jsonl

truth.jsonl and the histories beside it come from `carma bench memory-truth` on a card; TRACES has a trial run's report
and events for each case (`TRACES/<case>/report.json`). A trial shows the same allocations in the same order as the
card, but for what libraries took. So whatever the history has more, where a convolution was called, is its workspace.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import msgspec

from carma.trial.replay.conv_shapes import DTYPES, OPS
from carma.trial.report import ALLOC, CALL, EVENTS, REPORT, Call, TrialReport, read_events
from carma_lab.bench.memory.zoo import history

Blocks = tuple[int, ...]
SMALL_BYTES = 1 << 16
ALLOCATIONS_MOST = 9_000  # a step or more of all but the longest; the time grows with the square
KEPT_BYTES = (32 << 20, 1 << 20)  # cuBLAS's
AGREED = 0.6
DIRECTIONS = {"conv": "forward", "conv_input_grad": "dgrad", "conv_weight_grad": "wgrad"}


def aligned(real: Sequence[int], ours: Sequence[int], calls: dict[int, list[int]]) -> Iterator[tuple[int, Blocks]]:
    """(Place in the trial, what the history has more there) for each place with calls that stands between places where
    the two agree."""
    matcher = SequenceMatcher(None, real, ours, autojunk=False)
    agreed: set[int] = set()
    more: dict[int, list[int]] = defaultdict(list)
    steps = matcher.get_opcodes()
    for what, first, last, place, end in steps[:-1] if steps and steps[-1][0] == "delete" else steps:
        if what == "equal":
            agreed.update(range(place, end))
        elif what == "delete":
            more[place] += [size for size in real[first:last] if size not in KEPT_BYTES]
    for place in calls:
        if place in agreed and place - 1 in agreed:
            yield place, tuple(more[place])


def observed(folder: Path, events: Sequence[history.Event]) -> Iterator[tuple[Call, Counter[Blocks]]]:
    """Each convolution of a case, with how often it took which blocks."""
    report = msgspec.json.decode((folder / REPORT).read_bytes(), type=TrialReport)
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
    ours = ours[:ALLOCATIONS_MOST]
    for place, blocks in aligned(real[: int(1.3 * len(ours)) + 60], ours, dict(calls)):
        convolutions = [call for call in calls[place] if report.calls[call].op in OPS]
        if len(convolutions) == 1:
            seen[convolutions[0]][blocks] += 1
    for index, counts in seen.items():
        yield report.calls[index], counts


def row(call: Call, counts: Counter[Blocks], family: str) -> dict[str, Any] | None:
    """The row as the measurement of a card writes it; None if the case does not give one figure."""
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
    for case in map(json.loads, truth.read_text().splitlines()[1:]):
        folder = traces / case["id"]
        if not case.get("history") or not (folder / REPORT).is_file():
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
