"""How tasks slow each other down on the GPU at hand: each alone, then in pairs, triples and quadruples.

Every workload has a process of its own that stays (worker.py), so a group costs its seconds and no start-up. While a
group runs, the GPU's activity is read over the same span. core/sharing.py is fitted on the table that comes out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from carma.bench.gpu.groups import Group, draw
from carma.bench.gpu.workloads import WORKLOADS
from carma.core.model import GpuSample
from carma.monitor.nvml import NvmlSampler, open_nvml

WARM_S = 0.4
MEASURE_S = 1.6


class Options(msgspec.Struct, kw_only=True):
    mechanism: str = "mps"  # or timeslice
    pairs: int = 70
    triples: int = 45
    quadruples: int = 35
    seed: int = 1
    json: str = "interference.json"
    limit_s: float = 560.0  # stop there with what there is


class Row(msgspec.Struct, kw_only=True):
    """One group: who, each one's steps per second, and what the GPU showed meanwhile."""

    tasks: tuple[str, ...]
    percent: tuple[int, ...]  # MPS active thread percentage of each; 100: none set
    rates: tuple[float, ...]
    sm_active: float | None
    sm_occupancy: float | None
    dram_active: float | None
    gpu_util: float | None
    power_w: float | None
    energy_j: float | None
    memory_used_mib: int | None


class Hand:
    """One worker process."""

    def __init__(self, name: str, environment: dict[str, str], percent: int = 100) -> None:
        self.name = name
        self.percent = percent
        limited = {} if percent == 100 else {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "carma.bench.gpu.worker", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment, **limited},
            text=True,
        )

    def order(self, start: float) -> None:
        assert self._process.stdin is not None
        order = {"start": start, "warm_s": WARM_S, "measure_s": MEASURE_S}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker of {self.name} ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def mechanism(name: str) -> Iterator[dict[str, str]]:
    """The environment in which workers share the GPU that way; an MPS control daemon of our own where wanted."""
    if name == "timeslice":
        yield {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"}
        return
    with tempfile.TemporaryDirectory(prefix="carma-mps-") as directory:
        environment = {"CUDA_MPS_PIPE_DIRECTORY": directory, "CUDA_MPS_LOG_DIRECTORY": directory}
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env={**os.environ, **environment}, check=True)
        try:
            yield environment
        finally:
            subprocess.run(
                ["nvidia-cuda-mps-control"], input="quit\n", text=True, env={**os.environ, **environment}, check=False
            )


def together(hands: Sequence[Hand], sampler: NvmlSampler) -> Row:
    """One group, measured."""
    start = time.monotonic() + 0.02
    for hand in hands:
        hand.order(start)
    _sleep_until(start + WARM_S)
    before = sampler.sample(time.time())[0]
    _sleep_until(start + WARM_S + MEASURE_S)
    after = sampler.sample(time.time())[0]
    rates = tuple(float(hand.answer()["rate"]) for hand in hands)
    return Row(
        tasks=tuple(hand.name for hand in hands),
        percent=tuple(hand.percent for hand in hands),
        rates=rates,
        energy_j=_spent(before, after),
        **{name: getattr(after, name) for name in ("sm_active", "sm_occupancy", "dram_active", "gpu_util", "power_w")},
        memory_used_mib=after.memory_used_mib,
    )


def _sleep_until(at: float) -> None:
    time.sleep(max(0.0, at - time.monotonic()))


def _spent(before: GpuSample, after: GpuSample) -> float | None:
    return None if before.energy_j is None or after.energy_j is None else after.energy_j - before.energy_j


def run(options: Options) -> int:
    """Measure and write; what was measured so far is on disk at any moment."""
    began = time.monotonic()
    sampler = open_nvml()
    names = [workload.name for workload in WORKLOADS]
    sizes = {2: options.pairs, 3: options.triples, 4: options.quadruples}
    groups = _mixed(draw(names, sizes, options.seed), options.seed)
    rows: list[Row] = []
    ready: dict[str, Any] = {}
    with mechanism(options.mechanism) as environment:
        hands = {name: Hand(name, environment) for name in names}
        limited = _limited(environment) if options.mechanism == "mps" else {}
        try:
            hands, limited = _those_ready(hands, ready), _those_ready(limited, ready)
            print(f"{len(hands)} workers ready after {time.monotonic() - began:.0f} s", flush=True)
            plan = _plan(groups, hands, limited)
            for count, members in enumerate(plan):
                if time.monotonic() - began > options.limit_s:
                    break
                rows.append(together(members, sampler))
                if count % 20 == 0:
                    _write(options, rows, ready, sampler)
                    print(f"{count + 1} of {len(plan)} after {time.monotonic() - began:.0f} s", flush=True)
        finally:
            for hand in (*hands.values(), *limited.values()):
                hand.close()
    _write(options, rows, ready, sampler)
    sampler.close()
    return 0


def _those_ready(hands: dict[str, Hand], ready: dict[str, Any]) -> dict[str, Hand]:
    """A workload that this machine's torch or memory cannot run is left out, and said so."""
    found: dict[str, Hand] = {}
    for name, hand in hands.items():
        try:
            ready[name] = hand.answer()
            found[name] = hand
        except RuntimeError as error:
            print(f"left out: {error}", flush=True)
    return found


HEAVY = ("resnet50-224-b64-bf16", "vgg16-224-b32", "mlp-8192x4-b1024-bf16", "encoder-768x12-b16-bf16")
LIGHT = ("resnet18-cifar-b32", "mlp-512x4-b256", "encoder-256x4-b32")
PERCENT = 50


def _limited(environment: dict[str, str]) -> dict[str, Hand]:
    return {name: Hand(name, environment, PERCENT) for name in HEAVY}


def _plan(groups: Sequence[Group], hands: dict[str, Hand], limited: dict[str, Hand]) -> list[list[Hand]]:
    """Each alone, the groups, small tasks beside heavy ones with fewer threads, and each alone once more (drift)."""
    alone = [[hand] for hand in hands.values()]
    shared = [[hands[name] for name in group] for group in groups if all(name in hands for name in group)]
    guarded: list[list[Hand]] = [[hand] for hand in limited.values()]
    for heavy, hand in limited.items():
        for light in LIGHT if heavy in hands else ():
            guarded += [[hands[light], hand], [hands[light], hands[heavy]]]
    return [*alone, *shared, *guarded, *alone]


def _mixed(groups: list[Group], seed: int) -> list[Group]:
    """In an order of no meaning, so that a run that is cut short has some of every size."""
    import random

    random.Random(seed).shuffle(groups)
    return groups


def _write(options: Options, rows: list[Row], ready: dict[str, Any], sampler: NvmlSampler) -> None:
    """With all that is needed to run it again; a row a line, so that two tables can be compared."""
    gpu = sampler.gpus()[0]
    about = {
        "mechanism": options.mechanism,
        "gpu": gpu.name,
        "memory_mib": gpu.memory_mib,
        "seed": options.seed,
        "warm_s": WARM_S,
        "measure_s": MEASURE_S,
        "date": time.strftime("%Y-%m-%d"),
        "reserved_mib": {name: int(answer["reserved_mib"]) for name, answer in ready.items()},
        "driver": sampler.driver(),
        "torch": next((answer["torch"] for answer in ready.values()), ""),
        "python": sys.version.split()[0],
        "command": " ".join(["python -m carma.bench.gpu.interference", *sys.argv[1:]]),
    }
    lines = ",\n".join("  " + msgspec.json.encode(_rounded(row)).decode() for row in rows)
    head = json.dumps(about, indent=1).removesuffix("\n}")
    Path(options.json).write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n')


def _rounded(row: Row) -> dict[str, Any]:
    return {name: _round(value) for name, value in msgspec.structs.asdict(row).items()}


def _round(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_round(part) for part in value)
    return round(value, 5) if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(run(msgspec.convert(dict(pair.split("=", 1) for pair in sys.argv[1:]), Options, strict=False)))
