"""Collects what the trial tells and writes it for CARMA: report.json and events.bin (trace/report.py is the contract)."""

import ctypes
import json
import os
import sys
import threading
import time

from . import build

ALLOC, FREE, CALL, MARK, EMPTY_CACHE, OTHER_STREAM = 1, 2, 3, 4, 5, 6
_EVENT_BYTES = 24
_started = time.monotonic()
_lock = threading.Lock()
_written = False

calls = []  # each a dict of trace/report.Call
_call_index = {}
marks = []
_mark_index = {}
warnings = []
flags = set()
unknown_ops = set()
facts = {}  # further fields of the report


def call(op, dtype="", sizes=(), numbers=(), flags=()):
    """The number that stands for such a call in the events."""
    key = (op, dtype, tuple(map(tuple, sizes)), tuple(numbers), tuple(flags))
    if key not in _call_index:
        _call_index[key] = len(calls)
        calls.append({"op": op, "dtype": dtype, "sizes": key[2], "numbers": key[3], "flags": key[4]})
    return _call_index[key]


def note_call(*key, **words):
    build.library.carma_note(CALL, call(*key, **words), 0, 0)


def mark(name):
    if name not in _mark_index:
        _mark_index[name] = len(marks)
        marks.append(name)
    build.library.carma_note(MARK, _mark_index[name], 0, 0)


def warn(sentence):
    if sentence not in warnings:
        warnings.append(sentence)


def refuse(stop, reason):
    """End here: there is no figure, and this is why."""
    write(stop, reason)
    leave()


def leave(code=0):
    """At once, and without the script's own clean-up: nothing that it does from here on is wanted."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def write(stop, reason=""):
    global _written
    with _lock:
        if _written:
            return
        _written = True
    folder = os.environ["CARMA_TRACE_OUT"]
    rank = int(facts.get("rank", 0))
    suffix = "" if rank == 0 else f".{rank}"
    _put(os.path.join(folder, "events.bin" + suffix), _events())
    body = {
        "format": 1,
        "stop": stop,
        "reason": reason,
        "python": build.interpreter(),
        "seconds": time.monotonic() - _started,
        "warnings": warnings,
        "made_up_reads": build.library.carma_made_up() if build.library else 0,
        "unknown_ops": sorted(unknown_ops),
        "ops": _ops(),
        "calls": calls,
        "marks": marks,
        "flags": sorted(flags),
        **facts,
    }
    _put(os.path.join(folder, "report.json" + suffix), json.dumps(body).encode())


def _put(path, data):
    with open(path + ".part", "wb") as file:
        file.write(data)
    os.replace(path + ".part", path)


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
