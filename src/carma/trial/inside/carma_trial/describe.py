"""Describes the model: its layers in the order of its first training pass, as layer-based estimators need them."""

import itertools
import sys
import weakref
from collections.abc import Mapping

import torch

from . import passes, replaces, report

_layers = []
_handles = []
_first = {}
_root = []  # the module that was called first
_names = weakref.WeakKeyDictionary()
_KEPT = ("kernel_size", "stride", "padding", "dilation", "groups", "in_channels", "out_channels", "in_features",
         "out_features", "num_features", "normalized_shape", "num_embeddings", "embedding_dim", "hidden_size",
         "num_layers", "bidirectional", "num_heads", "embed_dim", "p")  # fmt: skip
_CONFIG = ("model_type", "hidden_size", "n_embd", "d_model", "num_hidden_layers", "n_layer", "num_layers", "vocab_size",
           "num_attention_heads", "n_head", "num_key_value_heads", "intermediate_size", "n_positions", "ffn_dim",
           "max_position_embeddings", "tie_word_embeddings", "is_decoder", "is_encoder_decoder")  # fmt: skip
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
_MOST = 20_000


def install():
    start()
    _watch_recomputation()
    passes.install()


def start():
    """Describes the next pass of a model that is trained, in `report.facts`, and discards the last description."""
    stop()
    _layers.clear()
    _first.clear()
    _root.clear()
    report.facts.pop("described", None)
    modules = torch.nn.modules.module
    _handles.append(modules.register_module_forward_pre_hook(_enter))
    _handles.append(modules.register_module_forward_hook(_leave))


def stop():
    while _handles:
        _handles.pop().remove()


def _watch_recomputation():
    @replaces(torch.utils.checkpoint, "checkpoint")
    def checkpoint(plain, *args, **words):
        report.flags.add("checkpoint")
        return plain(*args, **words)


def optimizer(all_of_them):
    passes.stepped()
    described = report.facts.get("described")
    if described is None or not all_of_them:
        return
    described["checkpointing"] = "checkpoint" in report.flags
    described["passes"] = passes.seen()
    chosen = max(all_of_them, key=lambda each: len(each.state))
    described["optimizer"] = type(chosen).__name__
    for kept in itertools.islice(chosen.state.values(), 1):
        if isinstance(kept, dict):
            described["optimizer_slots"] = sum(1 for value in kept.values() if getattr(value, "ndim", 0) > 0)


def _enter(module, inputs):
    if _first or not torch.is_grad_enabled():
        return
    parameters = list(module.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        return  # a model that only prepares data
    shape = next((list(tensor.shape) for tensor in _tensors([*inputs, *_keywords()])), [])
    _root.append(module)
    _first.update(
        parameters=sum(parameter.numel() for parameter in parameters),
        dtype=str(parameters[0].dtype).replace("torch.", ""),
        input=shape,
        autocast="",
        channels_last=any(_is_channels_last(parameter) for parameter in parameters),
        config=_config(module),
        heads=_heads(module),
    )
    if shape:
        _first["batch"] = shape[0]
    for name, each in module.named_modules():
        _names[each] = name


def _tensors(value, depth=3):
    """The tensors of a batch of any structure, except scalars."""
    if isinstance(value, torch.Tensor):
        if value.ndim:
            yield value
    elif depth and isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each, depth - 1)
    elif depth and isinstance(value, Mapping):
        for each in list(value.values()):
            yield from _tensors(each, depth - 1)


def _keywords():
    """The keyword arguments of the model's call: global hooks get only the positional ones."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_name not in ("_call_impl", "inner"):
        frame = frame.f_back
    words = frame.f_locals.get("kwargs") if frame else None
    return list(words.values()) if isinstance(words, dict) else []


def _autocast():
    try:
        return torch.is_autocast_enabled("cuda")
    except TypeError:
        return torch.is_autocast_enabled()


def _autocast_dtype():
    try:
        return torch.get_autocast_dtype("cuda")
    except AttributeError:  # before torch 2.4
        return torch.get_autocast_gpu_dtype()


def _is_channels_last(parameter):
    """A kernel of one place is contiguous in both formats and shows nothing."""
    by_channels = parameter.ndim == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    return by_channels and not parameter.is_contiguous()


def _hugging_face(module):
    configs = (getattr(each, "config", None) for each in (module, *itertools.islice(module.modules(), 8)))
    return next((config for config in configs if config is not None and hasattr(config, "model_type")), None)


def _config(module):
    config = _hugging_face(module)
    return {name: str(getattr(config, name)) for name in _CONFIG if getattr(config, name, None) is not None}


def _heads(module):
    """Number of attention heads: the maximum over the layers; None without attention. A configuration takes
    precedence."""
    config = _hugging_face(module)
    found = [_most(getattr(config, name, None)) for name in ("num_attention_heads", "n_head")]
    if not any(found):
        found = [_most(vars(each).get(name)) for each in module.modules() for name in _HEADS]
    return max(found, default=0) or None


def _most(value):
    """`value` is a number, or one for each stage."""
    found = value if isinstance(value, (list, tuple)) else (value,)
    return max((each for each in found if type(each) is int), default=0)


def _leave(module, inputs, outputs):
    if not _first or not torch.is_grad_enabled():
        return
    if not _first["autocast"] and _autocast():  # some libraries turn it on inside the model's call
        _first["autocast"] = str(_autocast_dtype()).replace("torch.", "")
        report.flags.add("amp")
    if len(_layers) < _MOST:
        _add(module, inputs, outputs)
    if module is _root[0]:
        stop()  # recomputed layers, accumulated passes and second networks are not described
        if _layers:
            report.facts["described"] = {**_first, "layers": list(_layers)}


def _add(module, inputs, outputs):
    layer = layer_of(module, inputs, outputs)
    if layer is None:
        return
    if "batch" not in _first and layer["output"]:
        _first["batch"] = layer["output"][0]
    _layers.append({"name": _names.get(module, ""), **layer})


def layer_of(module, inputs, outputs):
    """The description of a module after its call; None for a container. The data set uses it, too."""
    own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    if next(module.children(), None) is not None and not own:
        return None
    out = outputs
    while isinstance(out, (tuple, list)) and out:
        out = out[0]
    if not isinstance(out, torch.Tensor):
        return None
    return {
        "kind": type(module).__name__,
        "output": list(out.shape),
        "parameters": own,
        "inputs": [list(value.shape) for value in inputs if isinstance(value, torch.Tensor)],
        "attributes": {name: str(getattr(module, name)) for name in _KEPT if hasattr(module, name)},
        "inplace": bool(getattr(module, "inplace", False)),
    }  # fmt: skip
