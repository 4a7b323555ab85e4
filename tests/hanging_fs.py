"""A FUSE directory that answers until a test makes it hang: for tests of network drives that hang. Needs root.

    with hanging_mount(path) as mount:
        mount.hang()    # every access to `path` blocks; a process that blocks there cannot even be killed
        mount.until_held()  # wait until an access blocks
        mount.resume()  # the accesses that wait are answered, and those that follow
        mount.abort()   # the accesses that wait fail; also done at the end

The directory is empty and open to all users. It is served by a process of its own, so that a test that blocks does not
block the file system. The layout of messages is the one of linux/fuse.h, protocol 7.31.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_MNT_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)

# Reads requests also while it hangs: one that the kernel still has in its queue would end with the process that waits.
_SERVER = """
import os, select, struct, sys

LOOKUP, FORGET, GETATTR, STATFS, INIT, OPENDIR, READDIR, RELEASEDIR = 1, 2, 3, 17, 26, 27, 28, 29
ACCESS, INTERRUPT, BATCH_FORGET = 34, 36, 42
ENOENT, ENOSYS = 2, 38

def reply(opcode, node):
    attributes = struct.pack("6Q10I", node, 0, 0, 0, 0, 0, 0, 0, 0, 0o040777, 2, 0, 0, 0, 4096, 0)
    if opcode == INIT:
        return 0, struct.pack("IIIIHHIIHH32x", 7, 31, 4096, 0, 16, 12, 4096, 1, 0, 0)
    if opcode == GETATTR:
        return 0, struct.pack("QII", 0, 0, 0) + attributes
    if opcode == OPENDIR:
        return 0, struct.pack("QII", 1, 0, 0)
    if opcode == STATFS:
        return 0, struct.pack("5Q4I24x", 0, 0, 0, 0, 0, 4096, 255, 4096, 0)
    if opcode in (READDIR, RELEASEDIR, ACCESS):
        return 0, b""
    return (-ENOENT if opcode == LOOKUP else -ENOSYS), b""

def answer(opcode, unique, node):
    error, body = reply(opcode, node)
    try:
        os.write(device, struct.pack("IiQ", 16 + len(body), error, unique) + body)
    except OSError:
        pass  # the calling process was interrupted

device, waiting, hangs = int(sys.argv[1]), [], False
os.set_blocking(device, False)
while True:
    ready, _, _ = select.select([0, device], [], [])
    if 0 in ready:
        word = os.read(0, 1)
        if not word:
            break
        hangs = word == b"h" or (word == b"?" and hangs)
        while waiting and not hangs:
            answer(*waiting.pop(0))
        os.write(1, word if word != b"?" else bytes([min(255, len(waiting))]))
    try:
        request = os.read(device, 1 << 20)
    except BlockingIOError:
        continue
    except OSError:
        break  # unmounted
    _, opcode, unique, node = struct.unpack_from("IIQQ", request)
    if opcode in (FORGET, INTERRUPT, BATCH_FORGET):
        continue
    if hangs:
        waiting.append((opcode, unique, node))
    else:
        answer(opcode, unique, node)
"""


class HangingMount:
    def __init__(self, path: Path, server: subprocess.Popen[bytes]) -> None:
        self.path = path
        self._server = server

    def hang(self) -> None:
        self._tell(b"h")

    def resume(self) -> None:
        self._tell(b"r")

    def until_held(self, count: int = 1, limit_s: float = 60.0) -> None:
        """Wait until at least `count` accesses block, at most 255."""
        deadline_s = time.monotonic() + limit_s
        while (held := self._ask(b"?")[0]) < count:
            assert time.monotonic() < deadline_s, f"{held} accesses block, not {count}"
            time.sleep(0.01)

    def abort(self) -> None:
        """The kernel aborts the connection when the server's descriptor is closed."""
        self._server.kill()
        self._server.communicate()

    def _tell(self, word: bytes) -> None:
        assert self._ask(word) == word

    def _ask(self, word: bytes) -> bytes:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(word)
        self._server.stdin.flush()
        return self._server.stdout.read(1)


def why_no_mounts() -> str | None:
    """Why there can be no such mount here; None when there can."""
    if os.geteuid() != 0:
        return "mounting FUSE needs root"
    return None if os.access("/dev/fuse", os.R_OK | os.W_OK) else "there is no /dev/fuse"


@contextlib.contextmanager
def hanging_mount(path: Path, *, only_for: int | None = None) -> Iterator[HangingMount]:
    """Mounts on an existing directory. Skips the test where that is not possible. `only_for`: the mount belongs to this
    uid, and the kernel lets no other user in, root included."""
    if (why := why_no_mounts()) is not None:
        pytest.skip(why)
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    try:
        whose = "user_id=0,group_id=0,allow_other" if only_for is None else f"user_id={only_for},group_id={only_for}"
        options = f"fd={device},rootmode=40000,{whose},default_permissions"
        if _libc.mount(b"hanging", os.fsencode(path), b"fuse", 0, options.encode()) != 0:
            pytest.skip(f"mounting FUSE failed: {os.strerror(ctypes.get_errno())}")
        server = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _SERVER, str(device)],
            pass_fds=(device,),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
    finally:
        os.close(device)
    mount = HangingMount(path, server)
    try:
        mount.resume()  # returns when it serves
        yield mount
    finally:
        mount.abort()
        _libc.umount2(os.fsencode(path), _MNT_DETACH)
