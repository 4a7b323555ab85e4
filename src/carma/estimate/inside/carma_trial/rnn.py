"""nn.LSTM, nn.GRU and nn.RNN as cuDNN runs them: one buffer for all weights, a reserve kept for the backward pass."""

import enum
import importlib
import types

from . import report

_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_GATES = {0: 1, 1: 1, 2: 4, 3: 3}


def install(torch):
    library = torch.library.Library("aten", "IMPL")
    install.library = library
    for name, mode in _MODES.items():
        for where in ("AutogradCUDA", "CUDA", "AutocastCUDA"):
            library.impl(f"{name}.input", _on_input(torch, mode, where == "AutocastCUDA"), where)
            library.impl(f"{name}.data", _on_data(torch, mode, where == "AutocastCUDA"), where)
    torch._use_cudnn_rnn_flatten_weight = lambda: True
    modes = importlib.import_module("torch.backends.cudnn.rnn")
    names = modes.get_cudnn_mode.__globals__  # the module itself is hidden behind an object of properties
    names["_cudnn"] = types.SimpleNamespace(RNNMode=enum.IntEnum("RNNMode", list(_MODES), start=0))


def kernels(torch):
    return {
        "_cudnn_rnn": lambda *args: _forward(torch, *args),
        "_cudnn_rnn_backward": lambda *args: _backward(torch, *args),
        "_cudnn_rnn_flatten_weight": lambda *args: _flatten(torch, *args),
        "_thnn_fused_gru_cell": lambda gates, _hidden, hx, *_biases: (_like(torch, hx), _wide(torch, hx, 5)),
        "_thnn_fused_gru_cell_backward": lambda grad, kept, biased: _gru_cell_backward(torch, grad, kept, biased),
    }


def _like(torch, tensor):
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _wide(torch, tensor, times):
    return torch.empty((tensor.shape[0], tensor.shape[1] * times), dtype=tensor.dtype, device=tensor.device)


def _gru_cell_backward(torch, grad, kept, biased):
    gates, hidden, into = _wide(torch, grad, 3), _wide(torch, grad, 3), _like(torch, grad)
    return gates, hidden, into, gates.sum(0) if biased else None, hidden.sum(0) if biased else None


def _on_input(torch, mode, cast):
    def run(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first):
        hx, params, input = _as_wanted(torch, cast, hx, params, input)
        return _run(
            torch, mode, input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first, []
        )

    return run


def _on_data(torch, mode, cast):
    def run(data, batch_sizes, hx, params, has_biases, num_layers, dropout, train, bidirectional):
        hx, params, data = _as_wanted(torch, cast, hx, params, data)
        sizes = batch_sizes.tolist()
        return _run(torch, mode, data, hx, params, has_biases, num_layers, dropout, train, bidirectional, False, sizes)

    return run


def _as_wanted(torch, cast, hx, params, input):
    if not cast:
        return hx, params, input
    dtype = torch.get_autocast_dtype("cuda")
    to = [p.to(dtype) for p in params]
    return ([h.to(dtype) for h in hx] if isinstance(hx, (list, tuple)) else hx.to(dtype)), to, input.to(dtype)


def _run(torch, mode, input, hx, params, biases, layers, dropout, train, both, batch_first, batch_sizes):
    lstm = mode == 2
    first, cell = (hx[0], hx[1]) if lstm else (hx, None)
    hidden = first.shape[-1]
    width = params[0].shape[0] // _GATES[mode]
    projected = hidden if lstm and hidden != width else 0
    with torch._C._DisableAutocast():
        out = torch.ops.aten._cudnn_rnn(
            input, params, 4 if biases else 2, None, first, cell, mode, width, projected, layers, batch_first,
            float(dropout), train, both, batch_sizes, None,
        )  # fmt: skip
    return (out[0], out[1], out[2]) if lstm else (out[0], out[1])


def _forward(
    torch, input, weight, stride0, weight_buf, hx, cx, mode, hidden, proj, layers, batch_first, dropout, train, both, sizes,
    dropout_state=None,
):  # fmt: skip
    directions = 2 if both else 1
    size = proj or hidden
    packed = len(sizes) != 0
    if batch_first and not packed:
        input = input.transpose(0, 1)
    plain = input.contiguous()
    steps, batch = (len(sizes), sizes[0]) if packed else plain.shape[:2]
    rows = plain.shape[0] if packed else steps * batch
    like = {"dtype": plain.dtype, "device": plain.device}
    out = torch.empty((rows, size * directions) if packed else (steps, batch, size * directions), **like)
    last = torch.empty(hx.shape, **like)
    cell = torch.empty(cx.shape if cx is not None else (0,), **like)
    buffer = weight_buf if weight_buf is not None else _buffer(torch, weight, like)
    numbers = (
        mode,
        rows,
        steps,
        batch,
        plain.shape[-1],
        hidden,
        proj,
        layers,
        directions,
        int(train),
        int(dropout > 0),
    )
    report.note_call("rnn", str(plain.dtype).removeprefix("torch."), numbers=numbers)
    reserve = torch.empty(
        (_reserve(plain.element_size(), *numbers) if train else 0,), dtype=torch.uint8, device=plain.device
    )
    if batch_first and not packed:
        out = out.transpose(0, 1)
    return out, last, cell, reserve, buffer


def _buffer(torch, weights, like):
    """Weights that lie in one storage, as flatten_parameters leaves them, are that buffer; others are copied into one."""
    first = weights[0].untyped_storage()
    if all(each.untyped_storage().data_ptr() == first.data_ptr() for each in weights):
        return torch.empty((0,), **like).set_(
            weights[0].untyped_storage(), 0, (first.nbytes() // weights[0].element_size(),)
        )
    return torch.empty((sum(each.numel() for each in weights),), **like)


def _reserve(itemsize, mode, rows, steps, batch, width, hidden, proj, layers, directions, train, dropped):
    """What cuDNN keeps for the backward pass: gates and cell states of each step, and dropout's mask."""
    gates = {0: 1, 1: 1, 2: 6, 3: 5}[mode]
    held = gates * rows * hidden * directions * layers * itemsize
    between = (layers - 1) * rows * hidden * directions * itemsize if layers > 1 else 0
    return held + (between if dropped else 0)


def _backward(torch, input, weight, stride0, weight_buf, hx, cx, output, grad_out, grad_hy, grad_cy, mode, hidden, proj,
              layers, batch_first, dropout, train, both, sizes, dropout_state, reserve, mask):  # fmt: skip
    like = {"dtype": input.dtype, "device": input.device}
    if batch_first and len(sizes) == 0:
        input, grad_out = input.transpose(0, 1), None if grad_out is None else grad_out.transpose(0, 1)
    plain, grad = input.contiguous(), None if grad_out is None else grad_out.contiguous()
    numbers = (mode, plain.numel() // plain.shape[-1], hidden, layers, 2 if both else 1)
    into = torch.empty(plain.shape, **like)
    first = torch.empty(hx.shape, **like)
    cell = torch.empty(cx.shape, **like) if cx is not None else None
    report.note_call("rnn_grad", str(input.dtype).removeprefix("torch."), numbers=numbers)
    gradients = torch.empty((weight_buf.numel(),), **like) if mask[3] else None
    views, at = [], 0
    for each in weight:
        if gradients is None:
            views.append(torch.empty((0,), **like))
            continue
        views.append(gradients[at : at + each.numel()].view(each.shape))
        at += each.numel()
    del grad
    if batch_first and len(sizes) == 0:
        into = into.transpose(0, 1)
    return into, first, cell, views


def _flatten(torch, weights, stride0, width, mode, hidden, proj, layers, batch_first, both):
    like = {"dtype": weights[0].dtype, "device": weights[0].device}
    buffer = torch.empty((sum(each.numel() for each in weights),), **like)
    at = 0
    for each in weights:
        each.set_(buffer.untyped_storage(), at, each.shape, each.stride() if each.is_contiguous() else ())
        at += each.numel()
    return buffer
