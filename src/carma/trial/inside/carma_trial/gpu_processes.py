"""Which processes use the GPU. A trial run follows one process, on the GPUs of the request; more are refused.

Each process writes a file beside the report: when it began, whether it has allocated on the GPU, and when its trial
ended. A trial is short. Of two processes that would run side by side for hours, the first may end its trial before the
other begins to use the GPU, so it waits for the other about as long as it took itself.
"""

import json
import os
import time

_PREFIX = "user-"
_LOOK_S = 0.05
_begun = {"at_s": time.monotonic(), "noted": False, "took_s": 0.0}
_cards = {"here": 1, "wanted": 1}


def install(count):
    _cards["here"] = count
    os.register_at_fork(after_in_child=begin)


def begin():
    _begun.update(at_s=time.monotonic(), noted=False)
    if not int(os.environ.get("RANK") or 0):
        _put(None)


def noted():
    return _begun["noted"]


def note():
    if not _begun["noted"]:
        _begun.update(noted=True, took_s=time.monotonic() - _begun["at_s"])
        _put(None)


def forget():
    """Another rank has a GPU of its own."""
    _begun["noted"] = False
    try:
        os.unlink(out_file(f"{_PREFIX}{os.getpid()}"))
    except OSError:  # there is none
        pass


def want_cards(count):
    _cards["wanted"] = max(_cards["wanted"], count)


def too_many_cards():
    """Why there is no figure if more GPUs are used than the estimate is for, else ""."""
    wanted, here = _cards["wanted"], _cards["here"]
    if wanted <= here:
        return ""
    about = "one" if here == 1 else str(here)
    return f"the script uses {wanted} GPUs (cuda:{wanted - 1}), but the estimate is for {about}: try -G {wanted}"


def at_once():
    """Why there is no figure if other processes use the GPU at the same time, else "". For the end of the trial."""
    _put(time.monotonic())  # first: of two that end now, one at least sees the other
    if not _begun["noted"]:
        return ""
    while any(_may_yet(other) for other in _others()):
        time.sleep(_LOOK_S)
    others = sum(1 for other in _others() if _beside(other))
    if not others:
        return ""
    return f"{others + 1} processes use the GPU at the same time; a trial run follows one: estimate them one by one"


def _may_yet(other):
    """Whether this other process may still begin to use the GPU. The parent of this process only waits for it."""
    if other["used"] or other["ended_s"] is not None or other["pid"] == os.getppid():
        return False
    return time.monotonic() < other["began_s"] + 2 * _begun["took_s"] + 1 and _lives(other["pid"])


def _beside(other):
    if not other["used"]:
        return False
    if other["ended_s"] is None:
        return _lives(other["pid"])
    # A child that ended before its parent went on did not run beside it.
    return other["ended_s"] > _begun["at_s"] and other["parent"] != os.getpid()


def _lives(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _others():
    for name in os.listdir(os.environ["CARMA_TRACE_OUT"]):
        if name.startswith(_PREFIX) and name[len(_PREFIX) :].isdigit() and name != f"{_PREFIX}{os.getpid()}":
            try:
                with open(out_file(name), encoding="utf-8") as file:
                    yield json.load(file)
            except (OSError, ValueError):  # its process has deleted it
                continue


def out_file(name):
    return os.path.join(os.environ["CARMA_TRACE_OUT"], name)


def _put(ended_s):
    body = {"pid": os.getpid(), "parent": os.getppid(), "began_s": _begun["at_s"], "used": _begun["noted"]}
    try:
        write_file(f"{_PREFIX}{os.getpid()}", json.dumps({**body, "ended_s": ended_s}).encode())
    except OSError:  # a full disk; writing the report fails, too
        pass


def write_file(name, data):
    """Atomically: a reader sees the whole file or none."""
    unfinished = out_file(f"{name}.{os.getpid()}.part")
    with open(unfinished, "wb") as file:
        file.write(data)
    os.replace(unfinished, out_file(name))
