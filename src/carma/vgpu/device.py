"""The state file and its lock: how processes share the made-up device.

Looking is free of locks: a reader takes the file as it is (it is only ever replaced whole) and moves its own copy to
now. Changing takes the lock, moves the file's state to now FIRST, drops dead processes, changes, and replaces the file.
A writer that is killed half-way leaves the old file, and the kernel frees its lock.

The directory is not sticky when it is shared between users, because a sticky one forbids replacing a file that another
user wrote. Whoever may use the virtual GPUs may also disturb them: they are for trials, never a security boundary.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from carma.core.model.values import Demand
from carma.errors import StoreError, Usage
from carma.vgpu.device_state import VERSION, VirtualGpu, VirtualProcess, World, advance

DIRECTORY_VARIABLE = "CARMA_VGPU_DIR"
LIMIT_VARIABLE = "CARMA_VGPU_LIMIT_MIB"  # memory limit of one process on each of its GPUs
_STATE, _NEXT, _LOCK = "state.json", "state.next", "lock"
_DECODER = msgspec.json.Decoder(World)
_ENCODER = msgspec.json.Encoder()


class OutOfDeviceMemory(Exception):
    """An allocation that the device, or the process's share of it, does not hold; told as PyTorch would."""

    def __init__(self, gpu: VirtualGpu, asked_mib: int, held_mib: int, others: dict[int, int], limit_mib: int | None):
        super().__init__(f"{asked_mib} MiB asked for on virtual GPU {gpu.index} do not fit")
        self.gpu, self.asked_mib, self.held_mib, self.others, self.limit_mib = (
            gpu,
            asked_mib,
            held_mib,
            others,
            limit_mib,
        )


class Device:
    """A door to one world, for any process. Holds no open files, so it can be kept across fork and threads."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._state = os.path.join(directory, _STATE)

    def look(self) -> World:
        """The world as it is now; the copy is the caller's."""
        world = self._read()
        advance(world, world.virtual_s(time.monotonic()))
        return world

    @contextmanager
    def changing(self) -> Iterator[World]:
        """The world as it is now, dead processes dropped; what the block changes is written when it ends well."""
        with self._locked():
            world = self.look()
            reap(world)
            yield world
            self._write(world)

    def start(self, world: World) -> None:
        """Write a new world, in place of one that may be there."""
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

    def _read(self) -> World:
        try:
            file = os.open(self._state, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise _unusable(self.directory, error) from error
        try:
            world = _DECODER.decode(_whole(file))
        except (msgspec.MsgspecError, OSError) as error:
            raise _unusable(self.directory, error) from error
        finally:
            os.close(file)
        if world.version != VERSION:
            raise StoreError(f"{self._state} is of version {world.version}; this program knows {VERSION}", "Remove it.")
        return world

    def _write(self, world: World) -> None:
        path = os.path.join(self.directory, _NEXT)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with suppress(FileNotFoundError):
            os.unlink(path)  # left by a writer that was killed; only the holder of the lock is here
        file = os.open(path, flags, 0o600)
        try:
            if world.shared:
                os.fchmod(file, 0o666)
            data = memoryview(_ENCODER.encode(world))
            while data:
                data = data[os.write(file, data) :]
        finally:
            os.close(file)
        os.rename(path, self._state)


def share_lock(directory: str) -> None:
    """A new lock that every user can take. Not the file that is there: a user may have linked another one to that
    name, whose mode would be changed."""
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


def allocate(world: World, process: VirtualProcess, more_mib: int, limit_mib: int | None = None) -> None:
    """Give the process so much more on each of its GPUs, or raise on the first that cannot."""
    for index in process.gpus:
        gpu = world.gpus[index]
        over_limit = limit_mib is not None and process.memory_mib + more_mib > limit_mib
        if over_limit or world.used_mib(index) + more_mib > gpu.memory_mib:
            others = {other.pid: other.memory_mib for other in world.on(index) if other is not process}
            raise OutOfDeviceMemory(gpu, more_mib, process.memory_mib, others, limit_mib)
    process.memory_mib += more_mib


def join(world: World, gpus: list[int], demand: Demand, wanted_s: float | None, name: str) -> VirtualProcess:
    """Enter this OS process, holding nothing yet."""
    pid = os.getpid()
    ticks = start_ticks(pid)
    if ticks is None:
        raise StoreError(
            f"/proc/{pid}/stat cannot be read", "Virtual GPUs need /proc to tell the living from the dead."
        )
    process = VirtualProcess(
        pid=pid, start_ticks=ticks, gpus=gpus, memory_mib=0, demand=demand, wanted_s=wanted_s, name=name
    )
    world.processes.append(process)
    return process


def leave(world: World, process: VirtualProcess) -> None:
    world.processes = [
        one for one in world.processes if (one.pid, one.start_ticks) != (process.pid, process.start_ticks)
    ]


def reap(world: World) -> bool:
    """Drop processes that are gone, as a driver does when a context's owner dies; True when there were any."""
    living = [process for process in world.processes if alive(process)]
    gone = len(living) != len(world.processes)
    world.processes = living
    return gone


def alive(process: VirtualProcess) -> bool:
    ticks = start_ticks(process.pid)
    if ticks is not None:
        return ticks == process.start_ticks
    try:
        os.kill(process.pid, 0)
    except PermissionError:
        return True  # another user's, behind a /proc that hides it
    except OSError:
        return False
    return not os.path.exists(f"/proc/{process.pid}/stat")  # there, but a zombie: its memory is free


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None when it is gone, a zombie, or hidden."""
    try:
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        text = os.read(file, 2048)
    except OSError:
        return None
    finally:
        os.close(file)
    fields = text[text.rindex(b")") + 2 :].split()  # the name may hold spaces and parentheses
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _whole(file: int) -> bytes:
    parts = []
    while part := os.read(file, 1 << 18):
        parts.append(part)
    return b"".join(parts)


def _unusable(directory: str, error: Exception) -> StoreError:
    return StoreError(
        f"the virtual GPUs in {directory} cannot be used: {error}",
        f"Is {DIRECTORY_VARIABLE} the directory of a running server? carma up --virtual-gpus 4 makes one.",
    )
