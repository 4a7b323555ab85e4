"""A directory that never answers, as a network drive whose server is gone: a FUSE mount without a server.

A process that reads it sleeps in the kernel until the mount is aborted, which happens at the end of the block.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multiuser.people import Person

_MNT_DETACH = 2


@contextlib.contextmanager
def hanging_directory(owner: Person, place: Path | None = None) -> Iterator[Path]:
    """Mounted over a directory of the owner's, by default a new one. Skips where FUSE cannot be used."""
    libc = ctypes.CDLL(None, use_errno=True)
    place = place or owner.folder(f"hangs-{secrets.token_hex(4)}")
    try:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        pytest.skip(f"/dev/fuse cannot be opened: {error.strerror}")
    options = f"fd={device},rootmode=40755,user_id={owner.uid},group_id={owner.gid},allow_other,default_permissions"
    try:
        if libc.mount(b"carma-test", os.fsencode(place), b"fuse", 0, options.encode()) != 0:
            pytest.skip(f"FUSE cannot be mounted: {os.strerror(ctypes.get_errno())}")
        yield place
    finally:
        os.close(device)  # the last descriptor: the kernel aborts every request that waits
        libc.umount2(os.fsencode(place), _MNT_DETACH)
