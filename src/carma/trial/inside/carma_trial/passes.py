"""Counts the calls of networks whose outputs a step holds: a description covers one call of one network.

Three calls before a backward pass (a triplet) keep three times the outputs; of two networks (a GAN) one is described.
Accumulated calls do not count: a backward pass after each releases its outputs.
"""

import weakref

import torch

from . import replaces

_now = {"running": None, "backward": 0, "calls": 0, "most": 0, "stepped": False}
_known = weakref.WeakSet()  # every module of every network so far
_networks = [0]


def install():
    modules = torch.nn.modules.module
    modules.register_module_forward_pre_hook(_enter)
    modules.register_module_forward_hook(_leave, always_call=True)
    replaces(torch.autograd, "backward", "grad")(_backward)


def stepped():
    """Ends the counting: between steps a script may call its model with gradients enabled."""
    _now["stepped"] = True


def seen():
    return max(1, _now["most"], _networks[0])


def _backward(plain, *args, **words):
    if not _now["stepped"]:
        _now["most"] = max(_now["most"], _now["calls"])
    _now["calls"] = 0
    _now["backward"] += 1
    try:
        return plain(*args, **words)
    finally:
        _now["backward"] -= 1


def _enter(module, inputs):
    """Counts only calls by the script itself: neither inner modules nor recomputation in a backward pass."""
    if _now["running"] is not None or _now["backward"] or not torch.is_grad_enabled():
        return
    if not _takes_part(module, inputs):
        return
    _now["running"] = module
    _now["calls"] += 1
    if module not in _known:
        _networks[0] += 1
        _known.update(module.modules())


def _leave(module, _inputs, _outputs):
    if module is _now["running"]:
        _now["running"] = None


def _takes_part(module, inputs):
    """Whether its outputs are kept: it is trained, or lies between trained modules and the loss."""
    first = next(module.parameters(), None)
    if first is None:
        return False
    if any(each.requires_grad for each in module.parameters()):
        return True
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs)
