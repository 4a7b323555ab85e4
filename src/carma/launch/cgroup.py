"""How often the kernel killed something for want of memory around here: what tells a host OOM from a plain SIGKILL.

The counter of the cgroup that the attempt runs in (version 2, then 1), else the machine's. Others may share the cgroup,
so a count that grew is evidence only together with a SIGKILL. Standard library only: the runner imports it.
"""

from __future__ import annotations

from carma.launch.procfs import read_bytes


def oom_kills() -> int | None:
    """None when nothing here counts them."""
    for path in _counter_files():
        count = _count(read_bytes(path))
        if count is not None:
            return count
    return None


def _counter_files() -> list[str]:
    files = []
    for line in read_bytes("/proc/self/cgroup").decode("utf-8", "surrogateescape").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            files += [
                f"{root}{path.rstrip('/')}/memory.events" for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
            ]
        elif "memory" in controllers.split(","):
            files += [f"/sys/fs/cgroup/memory{path.rstrip('/')}/memory.oom_control"]
    return [*files, "/proc/vmstat"]


def _count(text: bytes) -> int | None:
    for line in text.splitlines():
        name, _, value = line.partition(b" ")
        if name == b"oom_kill" and value.strip().isdigit():
            return int(value)
    return None
