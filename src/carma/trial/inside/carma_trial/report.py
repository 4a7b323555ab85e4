"""Collects the results of the trial and writes report.json and events.bin (trial/report.py is the contract)."""

import ctypes
import json
import os
import re
import sys
import threading
import time

from . import build, gpu_processes

ALLOC, FREE, CALL, MARK, EMPTY_CACHE, OTHER_STREAM = 1, 2, 3, 4, 5, 6
_EVENT_BYTES = 24
_WORTH = {"end": 1, "limit": 1, "error": 2, "unsupported": 3, "steps": 4}  # of several processes' reports one counts
_CAUSE_WORTH = {"no_gpu": 0, "several": 5}  # "several": about all processes, so that it counts most
_CAUSE = re.compile(r'"stop": "(\w+)", "cause": "(\w*)"')
_started = time.monotonic()
_lock = threading.Lock()
_written = False

_calls = {}  # values of trial/report.Call -> index
_marks = {}  # name -> index
warnings = []
flags = set()
facts = {}  # further fields of the report
UNUSED = "the script never used a GPU"


def call(op, dtype="", sizes=(), numbers=(), flags=()):
    """The number that stands for such a call in the events."""
    key = (op, dtype, tuple(map(tuple, sizes)), tuple(numbers), tuple(flags))
    return _calls.setdefault(key, len(_calls))


def note_call(*key, **words):
    build.library.carma_note(CALL, call(*key, **words), 0, 0)


def mark(name):
    build.library.carma_note(MARK, _marks.setdefault(name, len(_marks)), 0, 0)
    if not gpu_processes.noted() and used_gpu():
        use_gpu()


def use_gpu():
    """Marks this process as one that uses the GPU."""
    refuse_too_many_gpus()
    gpu_processes.note()


def refuse_too_many_gpus():
    reason = gpu_processes.too_many_cards()
    if reason:
        refuse("unsupported", reason, "several")


def running_s():
    """Seconds since torch was imported."""
    return time.monotonic() - _started


def warn(sentence):
    if sentence not in warnings:
        warnings.append(sentence)


def refuse(stop, reason, cause=""):
    """Ends the process: there is no figure, for this reason."""
    write(stop, reason, cause)
    leave()


def leave(code=0):
    """Ends the process at once, without the script's clean-up."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # closed, or replaced by something of the script's
            continue
    os._exit(code)


def note_steps(count):
    """Notes the steps for the reason that is given if the run is ended from outside. A helper process does not reset
    the number."""
    if facts.get("rank", 0) or (count == 0 and os.path.exists(gpu_processes.out_file("steps"))):
        return
    try:
        gpu_processes.write_file("steps", str(count).encode())
    except OSError:  # it is only a note
        pass


def used_gpu():
    return ALLOC in _events()[::_EVENT_BYTES]


def write(stop, reason="", cause=""):
    """The first call counts, and others wait for it: the first one may end the process afterwards."""
    global _written
    with _lock:
        if not _written:
            _written = True
            _write(stop, reason, cause)


def _write(stop, reason, cause):
    """Writes the report. The first rank's report counts if there are several processes, and the best of those."""
    several = gpu_processes.at_once()
    if several and stop in ("steps", "end"):
        stop, reason, cause = "unsupported", several, "several"
    events = _events()
    if stop == "end" and ALLOC not in events[::_EVENT_BYTES]:
        if only_starts_others():
            return
        reason, cause = UNUSED, "no_gpu"
    if facts.get("rank", 0) or _worth(stop, cause) <= _worth_of_written():
        return
    body = {
        "format": 1,
        "stop": stop,
        "cause": cause,
        "reason": reason,
        "python": ".".join(map(str, sys.version_info[:3])),
        "seconds": time.monotonic() - _started,
        "warnings": warnings,
        "made_up_reads": build.library.carma_made_up() if build.library else 0,
        "ops": _ops(),
        "calls": [dict(zip(("op", "dtype", "sizes", "numbers", "flags"), key)) for key in _calls],
        "marks": list(_marks),
        "flags": sorted(flags),
        **facts,
    }
    gpu_processes.write_file("events.bin", events)
    gpu_processes.write_file("report.json", json.dumps(body).encode())


def only_starts_others():
    """torchrun, `accelerate launch` and similar launchers: the processes that they start write the report."""
    return "torch.distributed.launcher.api" in sys.modules and "RANK" not in os.environ


def _worth(stop, cause):
    return _CAUSE_WORTH.get(cause, _WORTH[stop])


def _worth_of_written():
    try:
        with open(gpu_processes.out_file("report.json"), "rb") as file:
            found = _CAUSE.search(file.read(256).decode(errors="replace"))
    except OSError:
        return -1
    return _worth(*found.groups()) if found else -1


def _events():
    if build.library is None:
        return b""
    count = build.library.carma_events()
    buffer = ctypes.create_string_buffer(max(1, count * _EVENT_BYTES))
    build.library.carma_read(buffer, count)
    return buffer.raw[: count * _EVENT_BYTES]


def _ops():
    if build.library is None:
        return []
    size = build.library.carma_ops(None, 0)
    buffer = ctypes.create_string_buffer(size + 1)
    build.library.carma_ops(buffer, size)
    return buffer.raw[:size].decode().split("\n")[:-1]
