"""A virtual training task: `python -m carma.vgpu.virtual_task --memory-mib 3934 --sm 0.45 --dram 0.2 --seconds 30`.

A real process on the virtual GPUs that CUDA_VISIBLE_DEVICES names. Started by hand, with CARMA_VGPU_DIR, it is a
foreign process for CARMA. `--seconds` is its length when it runs alone; with neighbours it takes longer, by the sharing
model. Between the changes that it can foresee it sleeps.

It counts virtual optimizer steps (`--steps-per-s` of them in a second of work), as a PyTorch task does.

With `--grow-mib` it later takes more memory than was estimated, which the guards of bookings must handle. With `--gate`
it works without an end until that file exists; then it grows, and `--seconds` begin to count. With `--save` it saves on
SIGUSR1: it writes its progress into that file and ends; started again it continues from there.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable

from carma import step_file
from carma.core.model.values import Demand
from carma.errors import CarmaError, NotFound, Usage
from carma.vgpu.device import (
    LIMIT_VARIABLE,
    Device,
    DeviceLost,
    OutOfDeviceMemory,
    alive,
    allocate,
    device_from_environment,
    join,
    leave,
)
from carma.vgpu.device_state import IDLE, VirtualProcess, VirtualWorld, until_change_s

SAVED = 3  # exit code of a task that saved: its work is not done
_STEPS = 5  # number of allocations over the ramp
_GROW_STEPS = 20  # and over the later growth
_SHORTEST_SLEEP_S = 0.002
_POLL_S, _SLOW_POLL_S = 0.1, 0.25  # longest sleep: changes that cannot be foreseen (a kill, a fault) are found then
_FAST = 20.0  # from this speed on the shorter one
Steps = tuple[tuple[float, int], ...]  # allocations in order: progress in seconds, MiB


class _ProgressSaved(Exception):
    """Raised after a checkpoint on request; the text is the progress."""


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    checkpoint = SavedProgress(options.save) if options.save else None
    try:
        device = device_from_environment()
        world = device.read()
        gpus = visible_gpus(world, os.environ.get("CUDA_VISIBLE_DEVICES"))
        time.sleep(options.start_s / world.speed)
        return _VirtualRun(device, options, gpus, checkpoint).go()
    except _ProgressSaved as saved:
        print(saved, flush=True)
        return SAVED
    except CarmaError as error:
        print(f"carma.vgpu.virtual_task: {error}. {error.hint}".rstrip(), file=sys.stderr)
        return error.exit_code
    except OutOfDeviceMemory as error:
        print(error.as_pytorch(gpus.index(error.gpu.index)), file=sys.stderr)
    except DeviceLost as error:
        print(error, file=sys.stderr)
    return 1


def visible_gpus(world: VirtualWorld, variable: str | None) -> list[int]:
    """The indices of the GPUs that CUDA_VISIBLE_DEVICES names, in its order."""
    hint = "CARMA sets it for each attempt; by hand, give the UUIDs that `carma gpus` shows, with commas."
    names = [name.strip() for name in (variable or "").split(",") if name.strip()]
    if not names:
        raise Usage("CUDA_VISIBLE_DEVICES is not set or is empty, so no GPU can be used", hint)
    found: dict[int, None] = {}
    for name in names:
        gpu = world.gpu(name)
        if gpu is None:
            raise NotFound(f"CUDA_VISIBLE_DEVICES names {name}, and there is no such virtual GPU", hint)
        found[gpu.index] = None
    return list(found)


def limit_mib() -> int | None:
    """The memory limit of this process on each GPU; None if there is none."""
    text = os.environ.get(LIMIT_VARIABLE, "")
    if text and not text.isdecimal():
        raise Usage(f"{LIMIT_VARIABLE}={text} is not a whole number of MiB")
    return int(text) if text else None


class SavedProgress:
    """The seconds of work that are done, in a file; and whether saving was requested."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.requested = False
        self.done_s = 0.0
        if os.path.exists(file):
            with open(file, encoding="ascii") as found:
                self.done_s = float(found.read())
        signal.signal(signal.SIGUSR1, self._request)

    def _request(self, *_: object) -> None:
        self.requested = True

    def write(self, progress_s: float) -> float:
        """Adds the progress of this run and returns the sum. The old file exists until the new one is complete."""
        done_s = self.done_s + progress_s
        with open(f"{self.file}.new", "w", encoding="ascii") as new:
            new.write(repr(done_s))
        os.replace(f"{self.file}.new", self.file)
        return done_s


class StepCounter:
    """Counts `per_s` optimizer steps in a second of work."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._steps = 0
        self._slot = step_file.SlotWriter(os.environ.get(step_file.VARIABLE, ""))

    def write(self, world: VirtualWorld, progress_s: float) -> None:
        steps = int(progress_s * self._per_s)
        if steps > self._steps:
            self._steps = steps
            since_s = (progress_s - steps / self._per_s) / world.speed  # at full speed
            self._slot.write(steps, time.monotonic_ns() - int(since_s * 1e9))


class _VirtualRun:
    """One run: enter, allocate memory in steps, wait until the work is done, leave."""

    def __init__(
        self, device: Device, options: argparse.Namespace, gpus: list[int], checkpoint: SavedProgress | None
    ) -> None:
        self.device, self.options, self.gpus, self.limit_mib = device, options, gpus, limit_mib()
        self.steps = ramp_of(options) if options.gate else (*ramp_of(options), *growth_of(options))
        self.taken = 0  # number of steps done
        self.opened_s = None if options.gate else 0.0  # its progress when the gate opened
        self.printed = 0  # quarters of progress
        self.counter = StepCounter(options.steps_per_s)
        self.checkpoint = checkpoint
        if checkpoint is not None:
            options.seconds = max(_SHORTEST_SLEEP_S, options.seconds - checkpoint.done_s)

    def go(self) -> int:
        began_s = time.monotonic()
        me = self._enter()
        try:
            self._work(me)
            if self.options.hang:
                self._hang(me)
        finally:
            with self.device.changing() as world:
                leave(world, me)
        took_s = (time.monotonic() - began_s) * world.speed
        print(f"done: {self.options.seconds:g} s of work in {took_s:.1f} s", flush=True)
        return int(self.options.exit_code)

    def _work(self, me: VirtualProcess) -> None:
        """Works until the work is done or, for a task that is to hang, all memory is allocated."""
        while not self.options.hang or self.taken < len(self.steps):
            world = self._read()
            me = self._mine(world, me)
            self.counter.write(world, me.progress_s)
            self._save_if_requested(me)
            if self.opened_s is None and os.path.exists(self.options.gate):
                me = self._open(me)
            if self._due(me.progress_s) > self.taken:
                with self.device.changing() as world:
                    self._allocate(world, self._mine(world, me))
            elif me.done:
                break
            else:
                self._print_progress(me)
                self._sleep(world, me)

    def _save_if_requested(self, me: VirtualProcess) -> None:
        """Progress before the gate opens is not part of the work."""
        if self.checkpoint is not None and self.checkpoint.requested:
            done_s = self.checkpoint.write(0.0 if self.opened_s is None else me.progress_s - self.opened_s)
            raise _ProgressSaved(f"saved: {done_s:.1f} s of work are done")

    def _enter(self) -> VirtualProcess:
        asked = self.options
        occupancy = asked.sm * 0.45 if asked.occupancy is None else asked.occupancy  # published: .19 at .42, .30 at .64
        with self.device.changing() as world:
            names = ", ".join(self._usable(world))
            wanted_s = None if self.opened_s is None else asked.seconds
            demand = Demand(asked.sm, occupancy, asked.dram, asked.engine, asked.power)
            me = join(world, self.gpus, demand, wanted_s, "python")
            me.working = asked.busy_gpus
            self._allocate(world, me)
        print(f"started on {names}: {asked.memory_mib} MiB, {asked.seconds:g} s of work", flush=True)
        return me

    def _open(self, me: VirtualProcess) -> VirtualProcess:
        """The gate has opened: the work has an end from now on."""
        with self.device.changing() as world:
            me = self._mine(world, me)
            me.wanted_s = me.progress_s + self.options.seconds
        self.opened_s = me.progress_s
        self.steps += tuple((me.progress_s + at_s, mib) for at_s, mib in growth_of(self.options))
        return me

    def _allocate(self, world: VirtualWorld, me: VirtualProcess) -> None:
        """The steps that are due. After a failure only the steps before it are written."""
        for _, more_mib in self.steps[self.taken : self._due(me.progress_s)]:
            allocate(world, me, more_mib, self.limit_mib)
            self.taken += 1

    def _due(self, progress_s: float) -> int:
        return sum(at_s <= progress_s for at_s, _ in self.steps)

    def _read(self) -> VirtualWorld:
        """Takes the lock only if a neighbour has ended."""
        world = self.device.read()
        if all(alive(other) for index in self.gpus for other in world.on(index)):
            return world
        with self.device.changing() as world:
            return world

    def _mine(self, world: VirtualWorld, me: VirtualProcess) -> VirtualProcess:
        self._usable(world)
        found = world.process(me.pid, me.start_ticks)
        if found is None:  # the world was replaced
            raise DeviceLost
        return found

    def _usable(self, world: VirtualWorld) -> list[str]:
        found = [gpu for gpu in world.gpus if gpu.index in self.gpus]
        if len(found) < len(self.gpus) or any(gpu.lost for gpu in found):
            raise DeviceLost
        return [gpu.id for gpu in found]

    def _print_progress(self, me: VirtualProcess) -> None:
        if self.opened_s is None:
            return
        quarters = int(4 * (me.progress_s - self.opened_s) / self.options.seconds)
        if quarters > self.printed:
            self.printed = quarters
            print(f"progress {25 * quarters} %", flush=True)

    def _sleep(self, world: VirtualWorld, me: VirtualProcess) -> None:
        change_s = until_change_s(world, me)
        changes = [] if change_s is None else [change_s]
        changes += [max(0.0, at_s - me.progress_s) for at_s, _ in self.steps[self.taken : self.taken + 1]]
        longest_s = _POLL_S if world.speed >= _FAST else _SLOW_POLL_S
        time.sleep(max(_SHORTEST_SLEEP_S, min((longest_s, *(one / world.speed for one in changes)))))

    def _hang(self, me: VirtualProcess) -> None:
        """Keeps its memory, does nothing, never ends, as a deadlocked data loader."""
        with self.device.changing() as world:
            mine = self._mine(world, me)
            mine.demand, mine.wanted_s = IDLE, None
        print("hanging", flush=True)
        while True:
            signal.pause()


def ramp_of(options: argparse.Namespace) -> Steps:
    """The allocations of its start."""
    ramp_s = min(options.ramp_s, options.seconds)
    return tuple((ramp_s * place / (_STEPS - 1), part) for place, part in enumerate(_parts(options.memory_mib, _STEPS)))


def growth_of(options: argparse.Namespace) -> Steps:
    """The later allocations, from the moment its gate opens."""
    if not options.grow_mib:
        return ()
    begin_s = max(min(options.ramp_s, options.seconds), options.grow_at_s)
    step_s = options.grow_s / (_GROW_STEPS - 1)
    return tuple((begin_s + step_s * place, part) for place, part in enumerate(_parts(options.grow_mib, _GROW_STEPS)))


def _parts(total: int, count: int) -> list[int]:
    return [total * (place + 1) // count - total * place // count for place in range(count)]


def _number(kind: type[float], holds: Callable[[float], bool], what: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = kind(text)
        if not holds(value):
            raise argparse.ArgumentTypeError(f"{text} is not {what}")
        return value

    return parse


_share = _number(float, lambda value: 0.0 <= value <= 1.0, "between 0 and 1")
_seconds = _number(float, lambda value: 0.0 <= value < 1e9, "a number of seconds")
_length = _number(float, lambda value: 0.0 < value < 1e9, "a number of seconds above 0")
_mib = _number(int, lambda value: value >= 0, "a number of MiB")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m carma.vgpu.virtual_task", description="A task on virtual GPUs.")
    add = parser.add_argument
    add("--memory-mib", type=_mib, required=True, help="memory on each GPU")
    add("--seconds", type=_length, required=True, help="length when it runs alone")
    add("--sm", type=_share, default=0.5, help="SM activity alone, 0 to 1 (default 0.5)")
    add("--dram", type=_share, default=0.2, help="DRAM activity alone, 0 to 1 (default 0.2)")
    add("--occupancy", type=_share, help="SM occupancy alone, 0 to 1 (default: 0.45 of --sm)")
    add("--engine", type=_share, help="share of time with any kernel alone (default: estimated from --sm)")
    add("--power", type=_share, help="power alone, as a share of the card's range above idle (default: estimated)")
    add("--busy-gpus", type=int, default=0, help="number of its GPUs, the first ones, that do all work (default: all)")
    add("--ramp-s", type=_seconds, default=2.0, help="seconds of work over which the memory is allocated (default 2)")
    add("--grow-mib", type=_mib, default=0, help="additional memory that it takes later, on each GPU (default 0)")
    add("--grow-at-s", type=_seconds, default=0.0, help="seconds of work before it begins to grow (default 0)")
    add("--grow-s", type=_seconds, default=2.0, help="seconds of work over which it grows (default 2)")
    add("--gate", default="", help="a file: until it exists, the task neither grows nor ends")
    add("--start-s", type=_seconds, default=0.0, help="delay before it first uses a GPU (default 0)")
    add("--steps-per-s", type=_seconds, default=20.0, help="optimizer steps in a second of work (default 20)")
    add("--save", default="", help="a file: on SIGUSR1 its progress is saved there and it ends; a new start continues")
    add("--exit-code", type=int, default=0, help="exit code at its end (default 0)")
    add("--ignore-sigterm", action="store_true", help="only SIGKILL ends it early")
    add("--hang", action="store_true", help="allocates its memory, then does nothing for ever")
    return parser


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # tearing the interpreter down takes time that counts at high speed
