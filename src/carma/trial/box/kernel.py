"""The system calls that Python 3.11 does not offer. Each raises OSError with the attempted action.

Numbers are those of the kernel's headers; `mount_setattr` has the same number on every architecture (Linux 5.12).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct

MIB = 2**20
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_SLAVE = 1, 2, 4, 8, 0x1000, 0x4000, 0x80000
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_SECUREBITS, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 28, 38
_KEEP_CAPABILITIES = 1 << 2  # SECBIT_NO_SETUID_FIXUP
_SYS_MOUNT_SETATTR = 442
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_CAPABILITY_VERSION = 0x20080522
_LAST_CAPABILITY = 63
# What root may do to files in the copy: chown, override modes, act as owner, keep set-id bits.
FILE_CAPABILITIES = (0, 1, 3, 4)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
_libc.prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)
_libc.syscall.restype = ctypes.c_long


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    _check(_libc.unshare(ctypes.c_int(flags)), "making namespaces")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    result = _libc.mount(os.fsencode(source), os.fsencode(target), kind.encode(), flags, options.encode())
    _check(result, f"mounting {kind or source} on {target}")


def bind(source: str, target: str, *, recursive: bool = False) -> None:
    mount(source, target, "", MS_BIND | (MS_REC if recursive else 0))


def make_read_only(target: str) -> None:
    """The mount and all below it. A plain remount would remove other flags.

    MS_RDONLY and MS_NOSUID have the same values as MOUNT_ATTR_*.
    """
    attributes = struct.pack("QQQQ", MS_RDONLY | MS_NOSUID, 0, 0, 0)
    result = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(os.fsencode(target)),
        ctypes.c_uint(_AT_RECURSIVE),
        ctypes.c_char_p(attributes),
        ctypes.c_size_t(len(attributes)),
    )
    _check(result, f"restricting {target}")


def open_folder(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def change_root(new: str, old: str) -> None:
    _check(_libc.pivot_root(os.fsencode(new), os.fsencode(old)), f"changing the root to {new}")


def detach(target: str) -> None:
    _check(_libc.umount2(os.fsencode(target), ctypes.c_int(_MNT_DETACH)), f"unmounting {target}")


def die_with_parent(signal: int) -> None:
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal, 0, 0, 0), "asking for a signal at the parent's end")


def hide_from_ptrace() -> None:
    _check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "closing this process to others")


def give_up_privileges(*, root: bool) -> None:
    """Programs executed from here on gain no privileges. Root keeps those over files, which are copies."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "giving up new privileges")
    kept = FILE_CAPABILITIES if root else ()
    for capability in range(_LAST_CAPABILITY + 1):
        if capability in kept or _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
            continue
        if ctypes.get_errno() == errno.EINVAL:  # beyond those of this kernel
            break
        if root:  # another user has none left
            _check(-1, "giving up capabilities")
    _set_capabilities(sum(1 << capability for capability in kept))


def _set_capabilities(mask: int) -> None:
    """The effective and the permitted set; the inheritable one stays empty."""
    head = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    body = struct.pack("6I", low, low, 0, high, high, 0)
    _check(_libc.capset(ctypes.c_char_p(head), ctypes.c_char_p(body)), "giving up capabilities")


def act_on_files_as(uid: int, gid: int) -> None:
    """Changes only the identity for file systems, and keeps capabilities: a home directory on NFS may refuse root."""
    _check(_libc.prctl(_PR_SET_SECUREBITS, _KEEP_CAPABILITIES, 0, 0, 0), "keeping capabilities")
    _libc.setfsgid(ctypes.c_uint(gid))
    _libc.setfsuid(ctypes.c_uint(uid))
    _check(_libc.prctl(_PR_SET_SECUREBITS, 0, 0, 0, 0), "keeping capabilities")


def leave_keyring() -> None:
    """Starts a new session keyring: the inherited one of the daemon may hold keys of root or of other users."""
    number = {"x86_64": 250, "aarch64": 219, "ppc64le": 271}.get(os.uname().machine)
    if number is not None:
        _libc.syscall(ctypes.c_long(number), ctypes.c_long(1), None)  # KEYCTL_JOIN_SESSION_KEYRING


def start_loopback() -> None:
    """A new network namespace has a loopback interface that is down; torchrun's rendezvous needs it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(probe, _SIOCGIFFLAGS, request), 16)
        fcntl.ioctl(probe, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def set_host_name(name: str) -> None:
    _check(_libc.sethostname(name.encode(), ctypes.c_size_t(len(name))), "setting the host name")
