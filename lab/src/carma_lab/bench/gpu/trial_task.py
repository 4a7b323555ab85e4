"""The program that the trial submits; it is copied into a work directory, as a user's script would lie there.

`train` trains one of the workloads for a number of steps, or until some seconds after the trial's "go". `grow` takes
memory in blocks after "go". Both write what they do, one line with the time for each event, into a log of their own
(one for each attempt), with which the records of the daemon are compared. With --virtual the same happens on a virtual
GPU. A process that runs out of memory ends as PyTorch programs do.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import deque
from contextlib import closing
from pathlib import Path
from typing import Any, TextIO

FRAMEWORK_LIMITS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
WARM_STEPS = 8
LOOK_S = 0.02


class TorchCard:
    """A card used through torch. At most two steps are in flight, as in a loop that reads its loss, so that counted
    steps are done."""

    def __init__(self, workload: str) -> None:
        import torch

        torch.set_num_threads(1)
        self._torch = torch
        self._held: list[Any] = []
        self._flying: deque[Any] = deque()
        self._step: Any = None
        if workload:
            from carma_lab.bench.gpu.workloads import BY_NAME

            self._step = BY_NAME[workload].build()
        torch.zeros(1, device="cuda")  # the context

    def step(self) -> int:
        """Trains. Returns the number of steps that have ended meanwhile."""
        self._step()
        mark = self._torch.cuda.Event(blocking=False)
        mark.record()
        self._flying.append(mark)
        if len(self._flying) > 2:
            self._flying.popleft().synchronize()
        return 1

    def take(self, mib: int) -> None:
        """Allocates memory for the rest of the run."""
        self._held.append(self._torch.empty(mib << 20, dtype=self._torch.uint8, device="cuda"))

    def facts(self) -> dict[str, Any]:
        """What the process itself knows about its memory."""
        return {
            "reserved_mib": self._torch.cuda.max_memory_reserved() >> 20,
            "torch": self._torch.__version__,
            "held": self._torch.cuda.memory_reserved() >> 20,
        }

    def close(self) -> None:
        self._torch.cuda.synchronize()


class VirtualCard:
    """The same on a virtual GPU; a step is 10 ms of running alone."""

    STEP_S = 0.01

    def __init__(self, sm: float, dram: float) -> None:
        from carma.core.model.values import Demand
        from carma.vgpu.device import device_from_environment, join
        from carma.vgpu.virtual_task import limit_mib, visible_gpus

        self._device = device_from_environment()
        self._limit_mib = limit_mib()
        self._steps = 0
        with self._device.changing() as world:
            self._gpus = visible_gpus(world, os.environ.get("CUDA_VISIBLE_DEVICES"))
            self._me = join(world, self._gpus, Demand(sm, 0.45 * sm, dram), None, "python")

    def step(self) -> int:
        time.sleep(LOOK_S)
        mine = self._mine(self._device.read())
        ended = int(mine.progress_s / self.STEP_S) - self._steps
        self._steps += ended
        return ended

    def take(self, mib: int) -> None:
        from carma.vgpu.device import OutOfDeviceMemory, allocate

        try:
            with self._device.changing() as world:
                allocate(world, self._mine(world), mib, self._limit_mib)
        except OutOfDeviceMemory as error:
            sys.exit(error.as_pytorch(self._gpus.index(error.gpu.index)))

    def facts(self) -> dict[str, Any]:
        held_mib = self._mine(self._device.read()).memory_mib
        return {"reserved_mib": held_mib, "torch": "", "held": held_mib}

    def close(self) -> None:
        from carma.vgpu.device import leave

        with self._device.changing() as world:
            leave(world, self._me)

    def _mine(self, world: Any) -> Any:
        found = world.process(self._me.pid, self._me.start_ticks)
        if found is None:
            sys.exit("the virtual GPUs were replaced while the task ran")
        return found


class Log:
    """JSON lines with the time of day; each is on disk when it is written, because the process may be killed."""

    def __init__(self, path: str) -> None:
        self._file: TextIO = Path(f"{path}.{os.environ.get('CARMA_ATTEMPT', '1')}").open("w")  # noqa: SIM115

    def say(self, what: str, **more: Any) -> None:
        self._file.write(json.dumps({"at": time.time(), "what": what, **more}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


Card = TorchCard | VirtualCard


def main() -> int:
    options = _parser().parse_args()
    for name in FRAMEWORK_LIMITS if options.without_framework_limit else ():
        os.environ.pop(name, None)
    with closing(Log(options.log)) as log:
        log.say("started", pid=os.getpid())
        card: Card = VirtualCard(options.sm, options.dram) if options.virtual else TorchCard(options.workload)
        if options.virtual and options.memory_mib:
            card.take(options.memory_mib)
        (_train if options.how == "train" else _grow)(card, options, log)
        facts = card.facts()
        card.close()
        log.say("done", **facts)
    return 0


def _train(card: Card, options: argparse.Namespace, log: Log) -> None:
    """The warm-up is not counted. Once a second it says how far it is."""
    warm = 0
    while warm < WARM_STEPS:
        warm += card.step()
    log.say("ready", **card.facts())
    steps, told_at = 0, time.monotonic()
    while not _trained(steps, options):
        steps += card.step()
        if time.monotonic() - told_at >= 1.0:
            told_at = time.monotonic()
            log.say("steps", steps=steps, **card.facts())
    log.say("trained", steps=steps, **card.facts())


def _trained(steps: int, options: argparse.Namespace) -> bool:
    if options.steps:
        return bool(steps >= options.steps)
    said_s = _since_go(options.go)
    return said_s is not None and said_s >= options.after_go_s


def _grow(card: Card, options: argparse.Namespace, log: Log) -> None:
    """A block at a time; the last one is what is left."""
    log.say("ready", **card.facts())
    while (_since_go(options.go) or -1.0) < options.after_go_s:
        time.sleep(LOOK_S)
    taken = 0
    while taken < options.target_mib:
        block = min(options.block_mib, options.target_mib - taken)
        log.say("takes", mib=block, taken_mib=taken)
        card.take(block)
        taken += block
        log.say("took", taken_mib=taken)
        time.sleep(options.pace_s)
    log.say("grown", **card.facts())
    time.sleep(options.hold_s)


def _since_go(path: str) -> float | None:
    """Seconds since the trial made that file as the start signal."""
    try:
        return time.time() - os.stat(path).st_mtime
    except FileNotFoundError:
        return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="A task of the trial.")
    add = parser.add_argument
    add("how", choices=("train", "grow"))
    add("--log", required=True, help="written to, with the attempt's number behind it")
    add("--workload", default="", help="what is trained")
    add("--steps", type=int, default=0, help="number of steps")
    add("--go", default="", help="the file whose appearance means go")
    add("--after-go-s", type=float, default=0.0, help="train until then, or begin to grow then")
    add("--target-mib", type=int, default=0)
    add("--block-mib", type=int, default=1024)
    add("--pace-s", type=float, default=0.06, help="between two blocks")
    add("--hold-s", type=float, default=0.0, help="seconds after the last block")
    add("--without-framework-limit", action="store_true", help="drops the limit that CARMA gave to PyTorch")
    add("--virtual", action="store_true")
    add("--sm", type=float, default=0.1)
    add("--dram", type=float, default=0.05)
    add("--memory-mib", type=int, default=0, help="of a virtual task, at its start")
    return parser


if __name__ == "__main__":
    sys.exit(main())
