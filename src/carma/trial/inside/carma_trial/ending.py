"""Writes the report when the script ends by itself: at exit, or at an exception that nothing catches."""

import atexit
import multiprocessing
import os
import re
import sys

from . import evaluation, gpu_processes, replaces, report

_NETWORK = re.compile(
    r"name resolution|Name or service not known|Network is unreachable|Max retries exceeded|couldn't connect to"
    r"|offline mode|OfflineMode|LocalEntryNotFound|URLError|ConnectionError|ConnectTimeout|ProxyError|ConnectError"
)
_NO_NETWORK = "; a trial run has no network: download it once, so that the script finds it on the disk"
_COMPILED = re.compile(r"lib(?:cudart|cuda|torch_cuda|c10_cuda|cublas\w*|cudnn\w*|nvrtc)\.so|undefined symbol")
_NO_SHAPES = re.compile(r"(\w+::\w+): attempted to run this operator with Meta tensors|Could not run '(\w+::[\w.]+)'")
_exit = {"code": 0, "words": ""}


def install():
    @replaces(sys, "exit")
    def exit(leave, status=None, /):
        _exit["code"] = status if isinstance(status, int) else 0 if status is None else 1
        _exit["words"] = f": {status}"[:300] if isinstance(status, str) else ""
        leave(status)

    @replaces(sys, "excepthook")
    def died(before, kind, error, trace):
        starts_others = report.only_starts_others() and not report.used_gpu()
        if not issubclass(kind, KeyboardInterrupt) and not starts_others:
            if evaluation.reached():  # `_ended` finishes the report
                report.warn(f"after the steps the script ended with {kind.__name__}")
            else:
                report.write(*reason_of(kind, error, trace))
                _exit["code"] = 1
        before(kind, error, trace)

    atexit.register(_ended)


def _ended():
    if evaluation.reached():
        evaluation.finish()
    steps = report.facts.get("steps", 0)
    progress = f"after {steps} optimizer step{'' if steps == 1 else 's'}" if steps else "before an optimizer step"
    code = _exit["code"]
    if code and multiprocessing.parent_process() is not None:
        report.leave(code & 0xFF)  # the process that started it gets the error, and reports it
    if code:
        report.write("error", f"the script exited with code {code} {progress}{_exit['words']}", "crashed")
    else:
        report.write("end", f"the script ended by itself {progress}")
    report.leave(code & 0xFF)


def reason_of(kind, error, trace):
    """`stop`, `reason` and `cause` of the report for an uncaught exception."""
    text = str(error).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    if kind.__name__ == "ProcessRaisedException":  # of torch.multiprocessing.spawn; the child's own error comes last
        reason, names = lines[-1][:500], ""
    else:
        reason = f"{kind.__name__}: {lines[0][:500]}{_place(trace)}"
        names = " ".join(each.__name__ for each in kind.__mro__)
    if _COMPILED.search(text) and "ImportError" in f"{names} {text}":
        return "unsupported", f"a trial run cannot load an extension that is compiled for CUDA: {reason}", ""
    if "No module named 'triton" in text:
        return "unsupported", f"a trial run cannot run kernels in Triton: {reason}", ""
    if gpu_processes.too_many_cards():
        return "unsupported", gpu_processes.too_many_cards(), "several"
    unknown = _NO_SHAPES.search(text)
    if unknown:
        operator = unknown[1] or unknown[2]
        return "unsupported", f"a trial run does not know the operator {operator}{_place(trace)}", ""
    if _NETWORK.search(f"{names} {text}"):
        return "error", reason + _NO_NETWORK, "no_network"
    return "error", reason, "crashed"


def _place(trace):
    """The last line of the script itself: not of a library or of CARMA."""
    place = last = None
    while trace is not None:
        last = trace
        if not re.search(r"site-packages|dist-packages|/lib/python3|carma_trial", trace.tb_frame.f_code.co_filename):
            place = trace
        trace = trace.tb_next
    place = place or last
    return f" ({os.path.basename(place.tb_frame.f_code.co_filename)}:{place.tb_lineno})" if place else ""
