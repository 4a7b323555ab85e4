"""The state file and its lock, through which processes share the virtual GPUs.

Reading takes no lock: the file is only ever replaced as a whole, and a reader advances its own copy to now. A change
takes the lock, advances the file's state to now FIRST, removes ended processes, changes the state, and replaces the
file. A writer that is killed meanwhile leaves the old file, and the kernel releases its lock.

A directory that users share is not sticky, because a sticky directory forbids replacing a file of another user. Every
user of the virtual GPUs may also disturb them: they are for trying CARMA out, not a security boundary.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from carma import procfs
from carma.core.model.values import Demand
from carma.errors import StoreError, Usage
from carma.vgpu.device_state import VERSION, VirtualGpu, VirtualProcess, VirtualWorld, advance

DIRECTORY_VARIABLE = "CARMA_VGPU_DIR"
LIMIT_VARIABLE = "CARMA_VGPU_LIMIT_MIB"  # memory limit of one process on each of its GPUs
_STATE, _NEXT, _LOCK = "state.json", "state.next", "lock"
_DECODER = msgspec.json.Decoder(VirtualWorld)
_ENCODER = msgspec.json.Encoder()


# The text of a PyTorch program for each error, word for word: outcomes are recognised by it.
_TRACEBACK = """Traceback (most recent call last):
  File "carma/vgpu/virtual_task.py", line 1, in <module>
    step()
"""
_DEVICE_LOST = (
    f"{_TRACEBACK}RuntimeError: CUDA error: unspecified launch failure\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
)


class DeviceLost(Exception):
    """The GPU failed under its process; the text is PyTorch's."""

    def __init__(self) -> None:
        super().__init__(_DEVICE_LOST)


class OutOfDeviceMemory(Exception):
    """An allocation beyond the memory of the device, or beyond the limit of the process."""

    def __init__(
        self, gpu: VirtualGpu, asked_mib: int, held_mib: int, others: dict[int, int], limit_mib: int | None
    ) -> None:
        super().__init__(f"{asked_mib} MiB asked for on virtual GPU {gpu.index} do not fit")
        self.gpu, self.asked_mib, self.held_mib = gpu, asked_mib, held_mib
        self.others, self.limit_mib = others, limit_mib

    def as_pytorch(self, ordinal: int) -> str:
        """torch 2.x's OutOfMemoryError; `ordinal` is the GPU's place in CUDA_VISIBLE_DEVICES, as CUDA counts."""
        free_mib = self.gpu.memory_mib - self.held_mib - sum(self.others.values())
        neighbours = "".join(f"Process {pid} has {_size(mib)} memory in use. " for pid, mib in self.others.items())
        allowed = f"{_size(self.limit_mib)} allowed; " if self.limit_mib is not None else ""
        return (
            f"{_TRACEBACK}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {_size(self.asked_mib)}. "
            f"GPU {ordinal} has a total capacity of {_size(self.gpu.memory_mib)} of which {_size(free_mib)} is free. "
            f"{neighbours}Including non-PyTorch memory, this process has {_size(self.held_mib)} memory in use. "
            f"{allowed}Of the allocated memory {_size(self.held_mib)} is allocated by PyTorch, and 0 bytes is reserved "
            "by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
            "Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
        )


class Device:
    """Access to one world, for any process. Has no open files, so it survives fork and works in all threads."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._state = os.path.join(directory, _STATE)

    def read(self) -> VirtualWorld:
        """The state now; the caller owns the copy."""
        world = self._read()
        advance(world, world.virtual_s(time.monotonic()))
        return world

    @contextmanager
    def changing(self) -> Iterator[VirtualWorld]:
        """The state now, without ended processes. The changes of the block are written unless it raises."""
        with self._locked():
            world = self.read()
            reap(world)
            yield world
            self._write(world)

    def start(self, world: VirtualWorld) -> None:
        """Write a new world; it replaces an existing one."""
        with self._locked():
            self._write(world)

    def exists(self) -> bool:
        return os.path.exists(self._state)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        path = os.path.join(self.directory, _LOCK)
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _unusable(self.directory, error) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _read(self) -> VirtualWorld:
        try:
            with open(self._state, "rb", opener=_open_waiting_for_nothing) as file:
                world = _DECODER.decode(file.read())
        except (msgspec.MsgspecError, OSError) as error:
            raise _unusable(self.directory, error) from error
        if world.version != VERSION:
            raise StoreError(f"{self._state} is of version {world.version}; this program knows {VERSION}", "Remove it.")
        return world

    def _write(self, world: VirtualWorld) -> None:
        path = os.path.join(self.directory, _NEXT)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with suppress(FileNotFoundError):
            os.unlink(path)  # left by a writer that was killed; this process has the lock
        with open(os.open(path, flags, 0o600), "wb") as file:
            if world.shared:
                os.fchmod(file.fileno(), 0o666)
            file.write(_ENCODER.encode(world))
        os.rename(path, self._state)


def share_lock(directory: str) -> None:
    """Make a new lock that every user can take. The existing file is not used: a user may have linked another file to
    that name, whose mode would be changed."""
    path = os.path.join(directory, _LOCK)
    with suppress(FileNotFoundError):
        os.unlink(path)
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.fchmod(lock, 0o666)
    finally:
        os.close(lock)


def device_from_environment() -> Device:
    directory = os.environ.get(DIRECTORY_VARIABLE, "")
    if not directory:
        raise Usage(
            f"{DIRECTORY_VARIABLE} is not set: there is no virtual GPU to run on",
            "CARMA sets it for the tasks of a server with virtual GPUs: carma up --virtual-gpus 4, then carma submit.",
        )
    return Device(directory)


def allocate(world: VirtualWorld, process: VirtualProcess, more_mib: int, limit_mib: int | None = None) -> None:
    """Allocate more memory on each of the process's GPUs. Raises OutOfDeviceMemory."""
    for index in process.gpus:
        gpu = world.gpus[index]
        over_limit = limit_mib is not None and process.memory_mib + more_mib > limit_mib
        if over_limit or world.used_mib(index) + more_mib > gpu.memory_mib:
            others = {other.pid: other.memory_mib for other in world.on(index) if other is not process}
            raise OutOfDeviceMemory(gpu, more_mib, process.memory_mib, others, limit_mib)
    process.memory_mib += more_mib


def join(world: VirtualWorld, gpus: list[int], demand: Demand, wanted_s: float | None, name: str) -> VirtualProcess:
    """Add this OS process, without memory yet."""
    me = procfs.process(os.getpid())
    if me is None:
        raise StoreError("/proc/self/stat cannot be read", "Virtual GPUs need /proc to find processes that have ended.")
    process = VirtualProcess(
        pid=me.pid,
        start_ticks=me.start_ticks,
        gpus=gpus,
        memory_mib=0,
        demand=demand,
        wanted_s=wanted_s,
        name=name,
    )
    world.processes.append(process)
    return process


def leave(world: VirtualWorld, process: VirtualProcess) -> None:
    world.processes = [
        one for one in world.processes if (one.pid, one.start_ticks) != (process.pid, process.start_ticks)
    ]


def reap(world: VirtualWorld) -> bool:
    """Remove processes that have ended, as a driver does with their contexts, and note those that stand still; True if
    anything has changed."""
    living = [process for process in world.processes if alive(process)]
    changed = len(living) != len(world.processes)
    world.processes = living
    for process in living:
        paused = procfs.stands_still(process.pid)
        changed, process.paused = changed or paused != process.paused, paused
    return changed


def alive(process: VirtualProcess) -> bool:
    found = procfs.process(process.pid)
    if found is not None:
        return found.start_ticks == process.start_ticks and not found.ended
    try:
        os.kill(process.pid, 0)
    except PermissionError:
        return True  # another user's process, hidden by /proc (hidepid)
    except OSError:
        return False
    return True


def _open_waiting_for_nothing(path: str, _flags: int) -> int:
    """Neither a link nor a pipe in place of the file is read."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def _unusable(directory: str, error: Exception) -> StoreError:
    return StoreError(
        f"the virtual GPUs in {directory} cannot be used: {error}",
        f"Is {DIRECTORY_VARIABLE} the directory of a running server? carma up --virtual-gpus 4 makes one.",
    )


def _size(mib: int) -> str:
    """A size as PyTorch's allocator prints it."""
    if mib <= 0:
        return "0 bytes"
    return f"{mib / 1024:.2f} GiB" if mib > 1024 else f"{mib:.2f} MiB"
