"""`carma bench steps`: what the count of optimizer steps costs a PyTorch task. Figures only: nothing passes or fails.

The import hook runs as in a task: through PYTHONPATH, in an interpreter of its own with torch. Its cost is measured by
itself, because it is far below the noise of a training step: one call, and one write of the count to a file, which
happens at most ten times a second. Both are compared with the step of a small network, for which the cost weighs most.
A write lets other threads of the program run: beside a busy one it takes longer, and the next write comes later.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from carma.core.model.values import Record
from carma.errors import NotFound
from carma.launch.step_metering import metered
from carma_lab.bench.results_file import Figure, FigureLog

STARTS = 60  # of an interpreter with the hook and without it, in turn
WRITES_PER_S = 10  # most writes of the count
BUSY_WRITES = 300  # beside a busy thread, one after each step
WRITE_SHARE = 1 / 1000  # of the time, at most (launch/hook/sitecustomize.py)
PROGRAM = """
import json, sys, threading, time
from statistics import median
import torch
from torch.optim import optimizer as module

rounds, calls, steps, busy_writes = json.loads(sys.argv[1])
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_num_threads(1)
layers = torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
model = torch.nn.Sequential(*layers).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batch, target = torch.randn(32, 64, device=device), torch.randint(10, (32,), device=device)
hooks = list(module._global_optimizer_post_hooks.values())
hook = hooks[0]
names = dict(zip(hook.__code__.co_freevars, hook.__closure__))
meter = names["meter"].cell_contents

def step():
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(batch), target).backward()
    optimizer.step()

def synchronize():
    if device == "cuda":
        torch.cuda.synchronize()

def each_s(function, count):
    synchronize()
    began = time.perf_counter()
    for _ in range(count):
        function()
    synchronize()
    return (time.perf_counter() - began) / count

each_s(step, steps)
found = {"hooks": len(hooks), "torch": torch.__version__, "device": device}
if device == "cuda":
    found["device"] = torch.cuda.get_device_name()
found["step_s"] = median(each_s(step, steps) for _ in range(rounds))
loop_s = median(each_s(lambda: None, calls) for _ in range(rounds))
found["call_s"] = median(each_s(lambda: hook(optimizer, (), {}), calls) for _ in range(rounds)) - loop_s
found["write_s"] = median(each_s(lambda: meter.write(meter.clock()), 1000) for _ in range(rounds))

def spin():
    while not over.is_set():
        pass

over = threading.Event()
threading.Thread(target=spin, daemon=True).start()
busy = []
for _ in range(busy_writes):
    step()
    began = time.perf_counter()
    meter.write(meter.clock())
    busy.append(time.perf_counter() - began)
found["busy_write_s"], found["busy_most_s"] = sum(busy) / len(busy), max(busy)
over.set()
print(json.dumps(found))
"""


class Options(Record, frozen=True, kw_only=True):
    """`json` is a file to write, or "-" for standard output."""

    python: str | None = None
    rounds: int = 9
    json: str | None = None


def run(options: Options) -> int:
    log = FigureLog(options.json)
    found = measure(options.python or sys.executable, options.rounds)
    for figure in _figures(found):
        log.add(figure)
    log.write("steps", options, torch=found["torch"], device=found["device"])
    return 0


def measure(python: str, rounds: int, calls: int = 100_000, steps: int = 300) -> dict[str, Any]:
    """Raises NotFound without torch."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "steps.bin")
        file.touch()
        environment = metered(os.environ, str(file))
        arguments = [python, "-c", PROGRAM, json.dumps([rounds, calls, steps, BUSY_WRITES])]
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
            raise NotFound(f"{python} cannot measure this: {last}", "Give an interpreter with torch: --python PATH.")
        found: dict[str, Any] = json.loads(done.stdout)
        starts = [(_start_s(python, environment), _start_s(python, metered(os.environ, None))) for _ in range(STARTS)]
    return {
        **found,
        "start_s": median(hook for hook, _ in starts),
        "plain_start_s": median(plain for _, plain in starts),
    }


def _start_s(python: str, environment: dict[str, str]) -> float:
    """Of an interpreter that does nothing."""
    began_s = time.perf_counter()
    subprocess.run([python, "-c", "pass"], env=environment, check=True)
    return time.perf_counter() - began_s


def _figures(found: dict[str, Any]) -> Iterator[Figure]:
    step_s, call_s, write_s = found["step_s"], found["call_s"], found["write_s"]
    share = call_s / step_s + write_s * WRITES_PER_S
    yield Figure(name="step", value=1e6 * step_s, unit="us", how=f"a training step, two layers, on {found['device']}")
    yield Figure(name="hook.call", value=1e9 * call_s, unit="ns", how="added to each step")
    yield Figure(name="hook.write", value=1e6 * write_s, unit="us", how=f"at most {WRITES_PER_S} times a second")
    most_s = found["busy_most_s"]
    most = (
        f"beside one busy thread; at most {1e3 * most_s:.1f} ms, then the next one {most_s / WRITE_SHARE:.0f} s later"
    )
    yield Figure(name="hook.write.busy", value=1e3 * found["busy_write_s"], unit="ms", how=most)
    yield Figure(name="hook.share", value=100 * share, unit="% of a step", how="call and writes together")
    yield Figure(
        name="start.added",
        value=1e3 * (found["start_s"] - found["plain_start_s"]),
        unit="ms",
        how=f"start of an interpreter without torch, added to {1e3 * found['plain_start_s']:.1f} ms",
    )
