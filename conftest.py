"""Makes a test run independent of how its runner was started, and marks the fast tests.

Runs once in every pytest process, before any test module is imported:

1. Signals: none is blocked, and none is ignored in the child processes of tests.
2. umask 022, and open standard streams.
3. Environment: the variables that change CARMA, terminals, locales, time zones or caches are removed or fixed. HOME is
   an empty directory, so that no test reads or writes files of the user who runs it.
4. Temporary directory: one with a short path that every user may enter.
5. Mounts, as root: a mount that a test makes is not visible to the tests of another process.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run, and no limit on how long a slow machine takes to draw them.
settings.register_profile("carma", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("carma")

ROOT = Path(__file__).parent
# `pytest -m fast`: the core, the wire format, the command line and the daemon without processes of users. A test in
# these folders that is marked `slow` is left out.
FAST = tuple(ROOT / "tests" / folder for folder in ("unit/core", "unit/cli", "unit/daemon", "unit/store", "scenario"))
OWN_OPTIONS = ("CARMA_CRASH_SEED", "CARMA_CRASH_KILLS", "CARMA_WRITE_WORDING")  # read by tests
DROPPED_PREFIXES = ("CARMA_", "SLURM_", "SLURMD_", "SRUN_", "CUDA_MPS_", "XDG_", "LC_", "PYTORCH_")
DROPPED = (
    *("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "TERM", "COLORTERM", "LANGUAGE"),
    *("TTY_COMPATIBLE", "TTY_INTERACTIVE", "NOTIFY_SOCKET", "PYTHONWARNINGS", "PYTEST_DEBUG_TEMPROOT"),
)
TEMPORARY_LIMIT_BYTES = 20
_CLONE_NEWNS, _MS_REC, _MS_SLAVE = 0x20000, 0x4000, 0x80000
FIXED = {"LANG": "C.UTF-8", "TZ": "UTC"}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Folders without fast tests are not even imported."""
    if config.option.markexpr != "fast":
        return None
    fast = any(collection_path.is_relative_to(folder) or folder.is_relative_to(collection_path) for folder in FAST)
    return None if fast or collection_path.name == "conftest.py" else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") is None and any(item.path.is_relative_to(folder) for folder in FAST):
            item.add_marker("fast")


def reset_signals() -> None:
    """A shell's background job starts with SIGINT ignored, nohup ignores SIGHUP, and both pass to child processes.

    A handler, unlike SIG_IGN, does not: it becomes the default action at exec. This process itself goes on to ignore
    the signal, except SIGINT, which raises KeyboardInterrupt as in any Python program.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:  # Python ignores these two by itself
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda _number, _frame: None)


def open_streams() -> None:
    """A closed standard stream would give its number to the next file that a test opens."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number is this one


def reset_temporary_directory() -> None:
    """The path of a Unix socket has at most 107 bytes, and tests that are root start tasks of other users."""
    chosen = Path(tempfile.gettempdir())
    open_to_all = all(folder.stat().st_mode & 0o001 for folder in (chosen, *chosen.parents))
    if len(str(chosen)) > TEMPORARY_LIMIT_BYTES or not open_to_all:
        chosen = Path("/tmp")
    os.environ["TMPDIR"] = tempfile.tempdir = str(chosen)


def reset_environment() -> None:
    for name in list(os.environ):
        if name in DROPPED or (name.startswith(DROPPED_PREFIXES) and name not in OWN_OPTIONS):
            del os.environ[name]
    os.environ.setdefault("PATH", "/usr/local/bin:/usr/bin:/bin")
    home = tempfile.mkdtemp(prefix="carma-test-home-")
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    os.environ.update(FIXED, HOME=home)
    time.tzset()


def hide_mounts() -> None:
    """Otherwise a mount that hangs for one test hangs for the tests that run beside it. Without root, or in a container
    that forbids it, there are no such tests."""
    libc = ctypes.CDLL(None)
    if os.geteuid() == 0 and libc.unshare(_CLONE_NEWNS) == 0:
        libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_SLAVE), None)


open_streams()
reset_signals()
os.umask(0o022)
reset_temporary_directory()
reset_environment()
hide_mounts()
