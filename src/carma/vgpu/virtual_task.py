"""A stand-in for a training task: `python -m carma.vgpu.virtual_task --memory-mib 3934 --sm 0.45 --dram 0.2 --seconds
30`.

It is a real process, on the virtual GPUs that CUDA_VISIBLE_DEVICES names. `--seconds` is its length when it runs alone;
with neighbours it takes longer, by the sharing model. It sleeps until about the next change it can foresee. With
`--grow-mib` it takes more memory later on than anybody was told: what bookings are guarded against. With `--gate` it
works without an end until that file is there; then it grows, and its `--seconds` begin to count. With `--save` it can
be asked to leave: on SIGUSR1 it writes into that file how far it is, and ends; started again it goes on from there.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time

from carma.core.model.values import Demand
from carma.errors import CarmaError, NotFound, Usage
from carma.vgpu.cuda_errors import device_lost, out_of_memory
from carma.vgpu.device import (
    LIMIT_VARIABLE,
    Device,
    OutOfDeviceMemory,
    alive,
    allocate,
    device_from_environment,
    join,
    leave,
)
from carma.vgpu.device_state import IDLE, VirtualProcess, World, until_change_s

LEFT = 3  # what it returns when it was asked to save: its work is not done
_STEPS = 5  # the memory is taken in so many parts over the ramp
_GROW_STEPS = 20  # and what it grows by later in so many
_SHORTEST_SLEEP_S = 0.002
_POLL_S, _SLOW_POLL_S = 0.1, 0.25  # a look at least so often: what cannot be foreseen (a kill, a fault) is seen then
_FAST = 20.0  # from this speed on the shorter one


class _Saved(Exception):
    """It was asked to save and has; the text says how far it is."""


class _Gone(Exception):
    """The device failed under the task; the text is what a CUDA program would write."""


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    checkpoint = Checkpoint(options.save) if options.save else None
    try:
        device = device_from_environment()
        world = device.look()
        gpus = visible_gpus(world, os.environ.get("CUDA_VISIBLE_DEVICES"))
        time.sleep(options.start_s / world.speed)
        return _Run(device, options, gpus, limit_mib(), checkpoint).go()
    except _Saved as saved:
        print(saved, flush=True)
        return LEFT
    except CarmaError as error:
        print(f"carma.vgpu.virtual_task: {error}. {error.hint}".rstrip(), file=sys.stderr)
        return error.exit_code
    except OutOfDeviceMemory as error:
        print(out_of_memory(error, gpus.index(error.gpu.index)), file=sys.stderr)
    except _Gone as error:
        print(error, file=sys.stderr)
    return 1


def visible_gpus(world: World, variable: str | None) -> list[int]:
    """The indices of the GPUs that CUDA_VISIBLE_DEVICES names, in its order."""
    hint = "CARMA sets it for each attempt; by hand, give the UUIDs that `carma gpus` shows, with commas."
    names = [name.strip() for name in (variable or "").split(",") if name.strip()]
    if not names:
        raise Usage("CUDA_VISIBLE_DEVICES is not set or is empty, so no GPU can be used", hint)
    found: list[int] = []
    for name in names:
        gpu = world.gpu(name)
        if gpu is None:
            raise NotFound(f"CUDA_VISIBLE_DEVICES names {name}, and there is no such virtual GPU", hint)
        if gpu.index not in found:
            found.append(gpu.index)
    return found


def limit_mib() -> int | None:
    """The process's share of each GPU, where one is set."""
    text = os.environ.get(LIMIT_VARIABLE, "")
    if text and not text.isdecimal():
        raise Usage(f"{LIMIT_VARIABLE}={text} is not a whole number of MiB")
    return int(text) if text else None


class Checkpoint:
    """How many seconds of the work are done, in a file; and whether somebody asks for it to be written."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.asked = False
        self.done_s = 0.0
        if os.path.exists(file):
            with open(file, encoding="ascii") as found:
                self.done_s = float(found.read())
        signal.signal(signal.SIGUSR1, self._ask)

    def _ask(self, *_: object) -> None:
        self.asked = True

    def write(self, progress_s: float) -> float:
        """So much was done in this run; returns all that is. The old file is there until the new one is whole."""
        done_s = self.done_s + progress_s
        with open(f"{self.file}.new", "w", encoding="ascii") as new:
            new.write(repr(done_s))
        os.replace(f"{self.file}.new", self.file)
        return done_s


class _Run:
    """One run: enter, take memory in steps, wait for the work to be done, leave."""

    def __init__(
        self,
        device: Device,
        options: argparse.Namespace,
        gpus: list[int],
        limit: int | None,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self.device, self.options, self.gpus, self.limit = device, options, gpus, limit
        self.steps = ramp_of(options) if options.gate else (*ramp_of(options), *growth_of(options))
        self.taken = 0  # of them
        self.opened_s = None if options.gate else 0.0  # its progress when the gate opened
        self.told = 0  # quarters of progress that were printed
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
        """Until all is done, or all memory is taken for one that is to hang."""
        while not self.options.hang or self.taken < len(self.steps):
            world = self._look()
            me = self._mine(world, me)
            self._save_if_asked(me)
            if self.opened_s is None and os.path.exists(self.options.gate):
                me = self._open(me)
            if self._due(me.progress_s) > self.taken:
                self._take(me)
            elif me.done:
                break
            else:
                self._tell(me)
                self._sleep(world, me)

    def _save_if_asked(self, me: VirtualProcess) -> None:
        """What is done before a gate opens is no part of its work."""
        if self.checkpoint is not None and self.checkpoint.asked:
            done_s = self.checkpoint.write(0.0 if self.opened_s is None else me.progress_s - self.opened_s)
            raise _Saved(f"saved: {done_s:.1f} s of work are done")

    def _enter(self) -> VirtualProcess:
        asked = self.options
        occupancy = asked.sm * 0.45 if asked.occupancy is None else asked.occupancy  # published: .19 at .42, .30 at .64
        with self.device.changing() as world:
            names = ", ".join(self._usable(world))
            wanted_s = None if self.opened_s is None else asked.seconds
            demand = Demand(asked.sm, occupancy, asked.dram, asked.engine, asked.power)
            me = join(world, self.gpus, demand, wanted_s, "python")
            me.working = asked.busy_gpus
            self._grow(world, me)
        print(f"started on {names}: {asked.memory_mib} MiB, {asked.seconds:g} s of work", flush=True)
        return me

    def _open(self, me: VirtualProcess) -> VirtualProcess:
        """From now on there is an end to its work."""
        with self.device.changing() as world:
            me = self._mine(world, me)
            me.wanted_s = me.progress_s + self.options.seconds
        self.opened_s = me.progress_s
        self.steps += tuple((me.progress_s + at_s, mib) for at_s, mib in growth_of(self.options))
        return me

    def _take(self, me: VirtualProcess) -> None:
        with self.device.changing() as world:
            self._usable(world)
            self._grow(world, self._mine(world, me))

    def _grow(self, world: World, me: VirtualProcess) -> None:
        """Take the steps that are due. On failure nothing was written but the steps before it."""
        for _, more_mib in self.steps[self.taken : self._due(me.progress_s)]:
            allocate(world, me, more_mib, self.limit)
            self.taken += 1

    def _due(self, progress_s: float) -> int:
        return sum(at_s <= progress_s for at_s, _ in self.steps)

    def _look(self) -> World:
        """Looking writes nothing; only a neighbour that died makes it worth taking the lock."""
        world = self.device.look()
        if all(alive(other) for index in self.gpus for other in world.on(index)):
            return world
        with self.device.changing() as world:
            return world

    def _mine(self, world: World, me: VirtualProcess) -> VirtualProcess:
        self._usable(world)
        found = world.process(me.pid, me.start_ticks)
        if found is None:
            raise _Gone(device_lost())  # the world was made anew under the task
        return found

    def _usable(self, world: World) -> list[str]:
        found = [gpu for gpu in world.gpus if gpu.index in self.gpus]
        if len(found) < len(self.gpus) or any(gpu.lost for gpu in found):
            raise _Gone(device_lost())
        return [gpu.id for gpu in found]

    def _tell(self, me: VirtualProcess) -> None:
        if self.opened_s is None:
            return
        quarters = int(4 * (me.progress_s - self.opened_s) / self.options.seconds)
        if quarters > self.told:
            self.told = quarters
            print(f"progress {25 * quarters} %", flush=True)

    def _sleep(self, world: World, me: VirtualProcess) -> None:
        longest_s = _POLL_S if world.speed >= _FAST else _SLOW_POLL_S
        change_s = until_change_s(world, me)
        if self.taken < len(self.steps):
            step_s = max(0.0, self.steps[self.taken][0] - me.progress_s)
            change_s = step_s if change_s is None else min(change_s, step_s)
        if change_s is not None:
            longest_s = min(longest_s, change_s / world.speed)
        time.sleep(max(_SHORTEST_SLEEP_S, longest_s))

    def _hang(self, me: VirtualProcess) -> None:
        """Holds its memory, does nothing, never ends: what a deadlocked data loader looks like from outside."""
        with self.device.changing() as world:
            mine = self._mine(world, me)
            mine.demand, mine.wanted_s = IDLE, None
        print("hanging", flush=True)
        while True:
            signal.pause()


def ramp_of(options: argparse.Namespace) -> tuple[tuple[float, int], ...]:
    """When it takes the memory that it begins with, in seconds of its work, and how much then, in MiB; in order."""
    ramp_s = min(options.ramp_s, options.seconds)
    return tuple((ramp_s * place / (_STEPS - 1), part) for place, part in enumerate(_parts(options.memory_mib, _STEPS)))


def growth_of(options: argparse.Namespace) -> tuple[tuple[float, int], ...]:
    """The same for what it takes later, from the moment its gate opens."""
    if not options.grow_mib:
        return ()
    begin_s = max(min(options.ramp_s, options.seconds), options.grow_at_s)
    step_s = options.grow_s / (_GROW_STEPS - 1)
    return tuple((begin_s + step_s * place, part) for place, part in enumerate(_parts(options.grow_mib, _GROW_STEPS)))


def _parts(total: int, count: int) -> list[int]:
    return [total * (place + 1) // count - total * place // count for place in range(count)]


def _share(text: str) -> float:
    value = float(text)
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return value


def _length(text: str) -> float:
    value = _seconds(text)
    if value == 0.0:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def _mib(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number of MiB")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m carma.vgpu.virtual_task", description="A task on virtual GPUs.")
    add = parser.add_argument
    add("--memory-mib", type=_mib, required=True, help="memory that it takes on each GPU")
    add("--seconds", type=_length, required=True, help="how long it takes when it runs alone")
    add("--sm", type=_share, default=0.5, help="SM activity alone, 0 to 1")
    add("--dram", type=_share, default=0.2, help="DRAM activity alone, 0 to 1")
    add("--occupancy", type=_share, help="SM occupancy alone, 0 to 1 (default: 0.45 of --sm)")
    add("--engine", type=_share, help="share of time with any kernel alone (default: guessed from --sm)")
    add("--power", type=_share, help="power alone, of what a card draws above idle (default: guessed)")
    add("--busy-gpus", type=int, default=0, help="the first so many of its GPUs do all its work (default: all)")
    add("--ramp-s", type=_seconds, default=2.0, help="the memory is taken over so many seconds of its work")
    add("--grow-mib", type=_mib, default=0, help="memory that it takes on top of that later, on each GPU")
    add("--grow-at-s", type=_seconds, default=0.0, help="seconds of its work before it begins to grow")
    add("--grow-s", type=_seconds, default=2.0, help="it grows over so many seconds of its work")
    add("--gate", default="", help="a file: until it is there, the task neither grows nor ends")
    add("--start-s", type=_seconds, default=0.0, help="delay before it first touches a GPU")
    add("--save", default="", help="a file: on SIGUSR1 it writes into it how far it is, and ends; goes on from there")
    add("--exit-code", type=int, default=0, help="what it returns at its end")
    add("--ignore-sigterm", action="store_true", help="only SIGKILL ends it early")
    add("--hang", action="store_true", help="takes its memory, then does nothing for ever")
    return parser


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing is left to tidy up, and tearing the interpreter down takes time that counts at high speed
