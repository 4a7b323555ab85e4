"""Observes the script: optimizer steps, forward and backward passes. Ends the run after enough steps."""

import os
import threading
import weakref

import torch

from . import describe, ending, evaluation, gpu_processes, replaces, report

STEPS = int(os.environ.get("CARMA_TRACE_STEPS") or 3)
MORE_STEPS = 15  # maximum further steps of the busiest optimizer, while another one has made fewer
_STEPS_ON_CPU = 10  # after which a script without an allocation on a GPU is refused

_optimizers = weakref.WeakKeyDictionary()  # -> steps
_on_cpu = [0]
_lock = threading.Lock()


def install():
    from torch.optim import optimizer as module

    report.facts["steps"] = 0
    _count_optimizers()
    module.register_optimizer_step_pre_hook(_before_step)
    module.register_optimizer_step_post_hook(_after_step)
    _mark_passes()
    describe.install()
    evaluation.install()
    ending.install()
    report.note_steps(0)


def _count_optimizers():
    @replaces(torch.optim.Optimizer, "__init__")
    def made(make, self, *args, **words):
        make(self, *args, **words)
        with _lock:
            _optimizers.setdefault(self, 0)
        if _on_gpu(self):
            gpu_processes.want_cards(1 + max(p.device.index or 0 for p in _parameters(self) if p.is_cuda))
            report.use_gpu()


def _before_step(optimizer, *_rest):
    if _on_gpu(optimizer):
        report.mark("step")
        _refuse_unseen(optimizer)
        _count_gradients(optimizer)


def _refuse_unseen(optimizer):
    """Refuses a search: with invented values it ends at once, so what it would keep is never allocated."""
    if any(kind.__name__ == "LBFGS" for kind in type(optimizer).__mro__):
        pairs = optimizer.param_groups[0].get("history_size", 100)
        reason = f"LBFGS keeps up to {pairs} pairs of gradients; how many depends on their values"
        report.refuse("unsupported", reason)


def _count_gradients(optimizer):
    grads = {}
    for parameter in _parameters(optimizer):
        _add(grads, parameter.grad)  # views of one bucket share its storage
    report.facts["gradients_bytes"] = max(report.facts.get("gradients_bytes", 0), sum(grads.values()))


def _parameters(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _on_gpu(optimizer):
    return any(parameter.is_cuda for parameter in _parameters(optimizer))


def _after_step(optimizer, *_rest):
    if not _on_gpu(optimizer):
        _on_cpu[0] += 1
        if _on_cpu[0] == _STEPS_ON_CPU and not report.used_gpu():
            report.refuse("end", report.UNUSED, "no_gpu")
        return
    report.mark("step_end")
    if evaluation.reached():
        evaluation.after_steps()
        return
    _count_gradients(optimizer)  # a closure makes them within the step
    with _lock:
        _optimizers[optimizer] = _optimizers.get(optimizer, 0) + 1
        counts = [count for each, count in _optimizers.items() if count or _on_gpu(each)]
    report.facts["steps"] = min(count for count in counts if count)
    report.note_steps(report.facts["steps"])
    _sizes()
    if max(counts) >= STEPS and (min(counts) >= STEPS or max(counts) >= STEPS + MORE_STEPS):
        evaluation.after_steps()


def _sizes():
    parameters, states, cards = {}, {}, set()
    for optimizer in list(_optimizers):
        for each in _parameters(optimizer):
            _add(parameters, each)
            cards.add(each.device)
        for kept in optimizer.state.values():
            for value in kept.values() if isinstance(kept, dict) else ():
                for each in value if isinstance(value, (list, tuple)) else (value,):
                    _add(states, each)
    if len([card for card in cards if card.type == "cuda"]) > 1:
        report.warn("the model is on several GPUs: the figures are the sum of all of them")
    report.facts["parameters_bytes"] = sum(parameters.values())
    report.facts["optimizer_bytes"] = sum(states.values())
    describe.optimizer(list(_optimizers))


def _add(storages, tensor):
    if getattr(tensor, "is_cuda", False):
        tensor = getattr(tensor, "_local_tensor", tensor)  # a shard
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()


def _mark_passes():
    @replaces(torch.autograd, "backward")
    def marked(backward, *args, **words):
        report.mark("backward")
        return backward(*args, **words)

    depth = threading.local()

    def before(_module, _inputs):
        depth.now = getattr(depth, "now", 0) + 1
        if depth.now == 1:
            evaluating = not torch.is_grad_enabled()
            report.mark("eval" if evaluating else "forward")
            if evaluating and report.facts["steps"]:
                evaluation.seen()

    def after(_module, _inputs, _outputs):
        depth.now = max(0, getattr(depth, "now", 1) - 1)

    hooks = torch.nn.modules.module
    hooks.register_module_forward_pre_hook(before)
    hooks.register_module_forward_hook(after, always_call=True)
