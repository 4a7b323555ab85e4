"""How a script may end by itself: what is told then, and with which words an error becomes a reason."""

import atexit
import multiprocessing
import os
import re
import sys

from . import evaluation, gpu_processes, report

_NETWORK = re.compile(
    r"name resolution|Name or service not known|Network is unreachable|Max retries exceeded|couldn't connect to"
    r"|offline mode|OfflineMode|LocalEntryNotFound|URLError|ConnectionError|ConnectTimeout|ProxyError|ConnectError"
)
_NO_NETWORK = "; a trial run has no network: download it once, so that the script finds it on the disk"
_COMPILED = re.compile(r"lib(?:cudart|cuda|torch_cuda|c10_cuda|cublas\w*|cudnn\w*|nvrtc)\.so|undefined symbol")
_NO_SHAPES = re.compile(r"(\w+::\w+): attempted to run this operator with Meta tensors|Could not run '(\w+::[\w.]+)'")
_exit = {"code": 0, "words": ""}


def install():
    leave, before = sys.exit, sys.excepthook

    def exit(status=None, /):
        _exit["code"] = status if isinstance(status, int) else 0 if status is None else 1
        _exit["words"] = f": {status}"[:300] if isinstance(status, str) else ""
        leave(status)

    def died(kind, error, trace):
        if issubclass(kind, KeyboardInterrupt) or _starter():
            before(kind, error, trace)
            return
        if evaluation.reached():
            before(kind, error, trace)
            report.warn(f"after the steps the script ended with {kind.__name__}")
            return  # its end finishes the report
        report.write(*reason_of(kind, error, trace))
        _exit["code"] = 1
        before(kind, error, trace)

    sys.exit, sys.excepthook = exit, died
    atexit.register(_ended)


def _starter():
    return report._only_starts_others() and not report.used_gpu()


def _ended():
    if evaluation.reached():
        evaluation.finish()
    steps = report.facts.get("steps", 0)
    how = "the script ended by itself" if not _exit["code"] else f"the script exited with code {_exit['code']}"
    far = f"after {steps} optimizer step{'' if steps == 1 else 's'}" if steps else "before an optimizer step"
    if _exit["code"] and multiprocessing.parent_process() is not None:
        report.leave(_exit["code"] & 0xFF)  # who started it is told the error, and tells it
    if _exit["code"]:
        report.write("error", f"{how} {far}{_exit['words']}")
    else:
        report.write("end", f"{how} {far}")
    report.leave(_exit["code"] & 0xFF)


def reason_of(kind, error, trace):
    """How it stopped, and one line: which error, in which words, where in the script."""
    words = str(error).strip()
    lines = [line.strip() for line in words.splitlines() if line.strip()] or [""]
    if kind.__name__ == "ProcessRaisedException":  # of torch.multiprocessing.spawn; the child's own error comes last
        reason, names = lines[-1][:500], ""
    else:
        reason = f"{kind.__name__}: {lines[0][:500]}{_place(trace)}"
        names = " ".join(each.__name__ for each in kind.__mro__)
    if _COMPILED.search(words) and "ImportError" in f"{names} {words}":
        return "unsupported", f"the script loads an extension that is compiled for CUDA, which a trial cannot: {reason}"
    if "No module named 'triton" in words:
        return "unsupported", f"the script has kernels in Triton, which a trial does not run: {reason}"
    if gpu_processes.too_many_cards():
        return "unsupported", gpu_processes.too_many_cards()
    unknown = _NO_SHAPES.search(words)
    if unknown:
        return "unsupported", f"a trial does not know the operator {unknown[1] or unknown[2]}{_place(trace)}"
    return "error", reason + (_NO_NETWORK if _NETWORK.search(f"{names} {words}") else "")


def _place(trace):
    """The last line that is the script's own: not a library's, nor ours."""
    place = last = None
    while trace is not None:
        last = trace
        if not re.search(r"site-packages|dist-packages|/lib/python3|carma_trial", trace.tb_frame.f_code.co_filename):
            place = trace
        trace = trace.tb_next
    place = place or last
    return f" ({os.path.basename(place.tb_frame.f_code.co_filename)}:{place.tb_lineno})" if place else ""
