"""The model's layers in the order of its first training pass: what the published estimators ask for."""

import itertools

from . import report

_layers = []
_handle = []
_first = {}
_KEPT = ("kernel_size", "stride", "padding", "dilation", "groups", "in_channels", "out_channels", "in_features",
         "out_features", "num_features", "normalized_shape", "num_embeddings", "embedding_dim", "hidden_size",
         "num_layers", "bidirectional", "num_heads", "embed_dim", "p")  # fmt: skip
_CONFIG = ("model_type", "hidden_size", "n_embd", "d_model", "num_hidden_layers", "n_layer", "num_layers", "vocab_size",
           "num_attention_heads", "n_head", "num_key_value_heads", "intermediate_size", "n_positions", "ffn_dim",
           "max_position_embeddings", "tie_word_embeddings", "is_decoder", "is_encoder_decoder")  # fmt: skip
_MOST = 20_000


def install(torch):
    modules = torch.nn.modules.module
    _handle.append(modules.register_module_forward_pre_hook(lambda module, inputs: _enter(torch, module, inputs)))
    _handle.append(modules.register_module_forward_hook(lambda module, inputs, out: _leave(torch, module, inputs, out)))


def stop():
    """The first optimizer step ends the first pass."""
    while _handle:
        _handle.pop().remove()
    if _layers and "described" not in report.facts:
        report.facts["described"] = {**_first, "layers": _layers}


def optimizer(all_of_them):
    described = report.facts.get("described")
    if described is None or not all_of_them:
        return
    chosen = all_of_them[0]
    described["optimizer"] = type(chosen).__name__
    for kept in itertools.islice(chosen.state.values(), 1):
        if isinstance(kept, dict):
            described["optimizer_slots"] = sum(1 for value in kept.values() if getattr(value, "ndim", 0) > 0)


def _enter(torch, module, inputs):
    if _first or not torch.is_grad_enabled():
        return
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    dtype = next((parameter.dtype for parameter in module.parameters()), torch.float32)
    shape = list(tensors[0].shape) if tensors else []
    _first.update(
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        dtype=str(dtype).removeprefix("torch."),
        input=shape,
        autocast=str(torch.get_autocast_dtype("cuda")).removeprefix("torch.") if _autocast(torch) else "",
        config=_config(module),
    )
    if shape:
        _first["batch"] = shape[0]
    for name, each in module.named_modules():
        each.__dict__.setdefault("_carma_name", name)


def _autocast(torch):
    try:
        return torch.is_autocast_enabled("cuda")
    except TypeError:
        return torch.is_autocast_enabled()


def _config(module):
    for each in (module, *itertools.islice(module.modules(), 8)):
        config = getattr(each, "config", None)
        if config is not None and hasattr(config, "model_type"):
            return {name: str(getattr(config, name)) for name in _CONFIG if getattr(config, name, None) is not None}
    return {}


def _leave(torch, module, inputs, outputs):
    if not _first or len(_layers) >= _MOST or not torch.is_grad_enabled():
        return
    own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    if next(module.children(), None) is not None and not own:
        return
    out = outputs
    while isinstance(out, (tuple, list)) and out:
        out = out[0]
    if not isinstance(out, torch.Tensor):
        return
    if "batch" not in _first and out.ndim:
        _first["batch"] = out.shape[0]
    _layers.append({
        "name": module.__dict__.get("_carma_name", ""),
        "kind": type(module).__name__,
        "output": list(out.shape),
        "parameters": own,
        "inputs": [list(value.shape) for value in inputs if isinstance(value, torch.Tensor)],
        "attributes": {name: str(getattr(module, name)) for name in _KEPT if hasattr(module, name)},
        "inplace": bool(getattr(module, "inplace", False)),
    })  # fmt: skip
