"""Network and namespaces: the command has none of the host's and cannot make its own."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

from tests.boxes import SandboxVariant
from tests.sandbox.programs import Python

# Prints for each call its name and its error number, 0 for success. clone(2) with the flag and SIGCHLD does the same
# as unshare(2).
MAKE_NAMESPACES = """
    import ctypes, os
    libc = ctypes.CDLL(None, use_errno=True)
    clone = {{"x86_64": 56, "aarch64": 220}}[os.uname().machine]
    for name, flags in {namespaces}.items():
        child = libc.syscall(clone, flags | 17, 0, 0, 0, 0)
        if child == 0:
            os._exit(0)
        print("clone", name, 0 if child > 0 else ctypes.get_errno())
        print("unshare", name, 0 if libc.unshare(flags) == 0 else ctypes.get_errno())
"""
NAMESPACES = {"user": 0x10000000, "mount": 0x20000, "pid": 0x20000000, "network": 0x40000000, "user+mount": 0x10020000}


def test_the_command_cannot_make_namespaces(variant: SandboxVariant, folder: Path, python: Python) -> None:
    ended = variant.run("", folder, command=python.command(MAKE_NAMESPACES.format(namespaces=NAMESPACES)))
    assert (ended.status.ended, ended.status.code) == ("exit", 0), ended.status
    answers = [line.rsplit(" ", 1) for line in ended.status.stdout.splitlines()]
    assert len(answers) == 2 * len(NAMESPACES)
    assert [call for call, number in answers if int(number) == 0] == []


def test_the_command_cannot_allow_namespaces_again(variant: SandboxVariant, folder: Path) -> None:
    script = "cat /proc/sys/user/max_user_namespaces; (echo 100 > /proc/sys/user/max_user_namespaces) 2>/dev/null"
    ended = variant.run(f"{script}; echo $?", folder)
    limit, code = ended.status.stdout.split()
    assert limit == "0"
    assert int(code) > 0


def test_groups_and_ids_are_the_same_as_outside(variant: SandboxVariant, folder: Path) -> None:
    (folder / "work" / "file").write_text("x")
    ended = variant.run("id -u; id -g; stat -c %u /proc; stat -c %u file; touch new; stat -c %u new", folder)
    uid, gid, root, other, new = ended.status.stdout.split()
    assert (int(uid), int(gid), int(new)) == (variant.owner.uid, variant.owner.gid, variant.owner.uid)
    if variant.name != "ordinary":  # in whose user namespace only their own id exists
        assert (int(root), int(other)) == (0, 0)


def test_no_network_but_the_loopback(variant: SandboxVariant, folder: Path, python: Python) -> None:
    script = """
        import socket
        with socket.socket() as outside:
            outside.settimeout(5)
            print(outside.connect_ex(("192.0.2.1", 80)))
        print([name for _, name in socket.if_nameindex() if name.startswith(("eth", "en", "wl", "docker"))])
    """
    ended = variant.run("", folder, command=python.command(script))
    code, names = ended.status.stdout.splitlines()
    assert int(code) > 0
    assert names == "[]"


def test_an_abstract_socket_of_the_host_cannot_be_reached(
    variant: SandboxVariant, folder: Path, python: Python
) -> None:
    name = f"carma-{secrets.token_hex(8)}"
    script = f"import socket; print(socket.socket(socket.AF_UNIX).connect_ex(chr(0) + {name!r}))"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0" + name)
        server.listen()
        ended = variant.run("", folder, command=python.command(script))
    assert int(ended.status.stdout) > 0
