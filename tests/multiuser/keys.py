"""The kernel's session keyring, for tests that put a key there and look who can see it."""

from __future__ import annotations

import ctypes
import platform

import pytest

_CALLS = {"x86_64": (248, 250), "aarch64": (217, 219)}  # add_key, keyctl
_JOIN_SESSION_KEYRING = 1
SESSION_KEYRING = -3


def keyring_calls() -> tuple[int, int]:
    """The numbers of the system calls add_key and keyctl. Skips where they are not known."""
    if platform.machine() not in _CALLS:
        pytest.skip(f"the system calls of {platform.machine()} are not known here")
    return _CALLS[platform.machine()]


def with_a_session_key(mark: str, add_key: int, keyctl: int) -> None:
    """Gives the calling process a new session keyring with one key. Raises OSError where that is not possible."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    keyring = ctypes.c_int(SESSION_KEYRING)
    joined = libc.syscall(keyctl, _JOIN_SESSION_KEYRING, None)
    if joined < 0 or libc.syscall(add_key, b"user", mark.encode(), b"secret", ctypes.c_size_t(6), keyring) < 0:
        raise OSError(ctypes.get_errno(), "no session keyring")
