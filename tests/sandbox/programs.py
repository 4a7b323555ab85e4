"""Programs that attack the limits of the sandbox, as words of a command line."""

from __future__ import annotations

from textwrap import dedent

MIB = 2**20

# Each process is in a session of its own: the kernel then schedules each of them like a user of its own (autogroup).
FORK_BOMB = """
    import os
    while True:
        try:
            if os.fork() == 0:
                os.setsid()
        except OSError:
            pass
"""
# Threads take process ids too.
THREAD_BOMB = """
    import _thread, time
    _thread.stack_size(65536)
    while True:
        try:
            _thread.start_new_thread(time.sleep, (1000,))
        except RuntimeError:
            time.sleep(0.01)
"""
# 20 processes whose grandchildren end at once as orphans, so that pid 1 has to reap all the time.
ORPHANS = """
    import os
    for _ in range(20):
        if os.fork() == 0:
            break
    while True:
        try:
            child = os.fork()
            if child == 0:
                for _ in range(8):
                    if os.fork() == 0:
                        os._exit(0)
                os._exit(0)
            os.waitpid(child, 0)
        except OSError:
            pass
"""
# {size}: bytes to hold. Each prints "held" if no limit was met.
MEMORY = {
    "anonymous": "held = bytearray(b'x') * {size}",
    "shared": "import mmap; held = mmap.mmap(-1, {size}); [held.write(b'x' * 65536) for _ in range({size} // 65536)]",
    "shared by many": """
        import mmap, os
        held = mmap.mmap(-1, {size})
        [held.write(b'x' * 65536) for _ in range({size} // 65536)]
        for _ in range(4):
            if os.fork() == 0:
                [held[at] for at in range(0, {size}, 4096)]
                break
    """,
    "memfd written": """
        import os
        fd = os.memfd_create('a')
        [os.write(fd, bytes(65536)) for _ in range({size} // 65536)]
    """,
    "memfd mapped and closed": """
        import mmap, os
        fd = os.memfd_create('a')
        os.ftruncate(fd, {size})
        held = mmap.mmap(fd, {size})
        [held.write(b'x' * 65536) for _ in range({size} // 65536)]
        os.close(fd)
    """,
    "memfd in the queue of a socket": """
        import array, os, socket
        ours, theirs = socket.socketpair()
        for _ in range(4):
            fd = os.memfd_create('a')
            ours.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [fd]))])
            [os.write(fd, bytes(65536)) for _ in range({size} // 65536 // 4)]
            os.close(fd)
    """,
    "memfd in the queue of a socket that is in the queue of a socket": """
        import array, os, socket
        pass_on = lambda end, fd: end.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [fd]))])
        ours, theirs = socket.socketpair()
        for _ in range(4):
            fd = os.memfd_create('a')
            pass_on(ours, fd)
            [os.write(fd, bytes(65536)) for _ in range({size} // 65536 // 4)]
            os.close(fd)
        outer, outer_end = socket.socketpair()
        pass_on(outer, theirs.fileno())
        theirs.close()
    """,
    "memfd registered with io_uring": """
        import ctypes, os, sys
        call = ctypes.CDLL(None).syscall
        for _ in range(4):
            ring = call(425, 8, ctypes.create_string_buffer(120))  # io_uring_setup
            fd = os.memfd_create('a')
            if ring < 0 or call(427, ring, 2, (ctypes.c_int * 1)(fd), 1) < 0:  # IORING_REGISTER_FILES
                sys.exit("no io_uring")
            [os.write(fd, bytes(65536)) for _ in range({size} // 65536 // 4)]
            os.close(fd)
    """,
    "shm file": """
        held = open('/dev/shm/a', 'wb')
        [held.write(bytes(65536)) for _ in range({size} // 65536)]
        held.flush()
    """,
    "deleted file": """
        import os
        held = open('/dev/shm/a', 'wb')
        os.unlink('/dev/shm/a')
        [held.write(bytes(65536)) for _ in range({size} // 65536)]
        held.flush()
    """,
    "many processes": """
        import os
        for _ in range(8):
            if os.fork() == 0:
                break
        held = bytearray(b'x') * ({size} // 8)
    """,
    "sysv": """
        import ctypes
        libc = ctypes.CDLL(None)
        libc.shmat.restype = ctypes.c_void_p
        segment = libc.shmget(0, ctypes.c_size_t({size}), 0o1600)
        address = libc.shmat(segment, None, 0)
        ctypes.memset(address, 1, {size})
        libc.shmdt(ctypes.c_void_p(address))
    """,
}
HOLD = """
    print("held", flush=True)
    import time
    time.sleep(1000)
"""


class Python:
    def __init__(self, path: str) -> None:
        self.path = path

    def command(self, *parts: str) -> tuple[str, ...]:
        return (self.path, "-I", "-S", "-c", "\n".join(dedent(part) for part in parts))

    def holding(self, kind: str, size_mib: int) -> tuple[str, ...]:
        return self.command(dedent(MEMORY[kind]).format(size=size_mib * MIB), HOLD)
