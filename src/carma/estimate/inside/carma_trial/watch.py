"""Follows the script: optimizer steps, forward and backward passes, the model's layers; ends the run when enough was seen."""

import os
import sys
import threading
import weakref

from . import describe, report

STEPS = int(os.environ.get("CARMA_TRACE_STEPS") or 3)
MORE_STEPS = 12  # of the busiest optimizer, while another one that the script made has not stepped as often

_optimizers = weakref.WeakKeyDictionary()  # -> steps
_lock = threading.Lock()


def install(torch):
    from torch.optim import optimizer as module

    _count_optimizers(torch)
    module.register_optimizer_step_pre_hook(_before_step)
    module.register_optimizer_step_post_hook(_after_step)
    _mark_passes(torch)
    describe.install(torch)
    _tell_the_end()


def _count_optimizers(torch):
    make = torch.optim.Optimizer.__init__

    def __init__(self, *args, **words):
        make(self, *args, **words)
        with _lock:
            _optimizers.setdefault(self, 0)

    torch.optim.Optimizer.__init__ = __init__


def _before_step(optimizer, *_rest):
    report.mark("step")
    grads = sum(grad.untyped_storage().nbytes() for grad in _grads(optimizer) if grad.is_cuda)
    report.facts["gradients_bytes"] = max(report.facts.get("gradients_bytes", 0), grads)


def _grads(optimizer):
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _after_step(optimizer, *_rest):
    if not any(p.is_cuda for group in optimizer.param_groups for p in group["params"]):
        return  # something on the CPU
    report.mark("step_end")
    with _lock:
        _optimizers[optimizer] = _optimizers.get(optimizer, 0) + 1
        counts = list(_optimizers.values())
    report.facts["steps"] = max(counts)
    _sizes()
    describe.stop()
    if max(counts) >= STEPS and (min(counts) >= STEPS or max(counts) >= STEPS + MORE_STEPS):
        finish()


def finish():
    report.write("steps")
    report.leave()


def _sizes():
    parameters = states = 0
    for optimizer in list(_optimizers):
        for group in optimizer.param_groups:
            parameters += sum(p.untyped_storage().nbytes() for p in group["params"] if p.is_cuda)
        for kept in optimizer.state.values():
            for value in kept.values() if isinstance(kept, dict) else ():
                if getattr(value, "is_cuda", False):
                    states += value.untyped_storage().nbytes()
    report.facts["parameters_bytes"] = parameters
    report.facts["optimizer_bytes"] = states
    describe.optimizer(list(_optimizers))


def _mark_passes(torch):
    backward = torch.autograd.backward

    def marked(*args, **words):
        report.mark("backward")
        return backward(*args, **words)

    torch.autograd.backward = marked
    depth = threading.local()

    def before(_module, _inputs):
        depth.now = getattr(depth, "now", 0) + 1
        if depth.now == 1:
            report.mark("forward" if torch.is_grad_enabled() else "eval")

    def after(_module, _inputs, _outputs):
        depth.now = max(0, getattr(depth, "now", 1) - 1)

    hooks = torch.nn.modules.module
    hooks.register_module_forward_pre_hook(before)
    hooks.register_module_forward_hook(after, always_call=True)


def _tell_the_end():
    """A script that ends, or dies, before its steps leaves a report too, so that the reason can be told."""
    import atexit

    def ended():
        report.write("end", f"the script ended after {report.facts.get('steps', 0)} optimizer steps")
        report.leave()

    atexit.register(ended)
    before = sys.excepthook

    def died(kind, error, trace):
        where = trace
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        place = f" ({os.path.basename(where.tb_frame.f_code.co_filename)}:{where.tb_lineno})" if where else ""
        text = str(error).strip().splitlines() or [""]
        report.write("error", f"{kind.__name__}: {text[0][:500]}{place}")
        before(kind, error, trace)
        report.leave(1)

    sys.excepthook = died
    report.facts["steps"] = 0
