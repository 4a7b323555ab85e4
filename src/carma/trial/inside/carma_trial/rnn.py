"""nn.LSTM, nn.GRU and nn.RNN as cuDNN runs them, and the fused cells.

Follows the order in which aten/src/ATen/native/cudnn/RNN.cpp and cudnn/AutocastRNN.cpp allocate and free; workspaces
are tensors like any other there, so they are here.
"""

import enum
import importlib
import types

import torch

from . import cuda_api, replaces, report, rnn_sizes
from .kernels import dtype_name, plain_like, register, room

_MODES = {"rnn_relu": rnn_sizes.RELU, "rnn_tanh": rnn_sizes.TANH, "lstm": rnn_sizes.LSTM, "gru": rnn_sizes.GRU}
_STATE_BYTES_PER_THREAD = 24  # cudnnDropoutGetStatesSize, over the threads that the GPU holds

_dropout_states = {}  # device -> the one state that all networks there share
_fresh_seed = set()  # devices whose state is created again on the next use, because the script seeded the GPU


def install():
    for name, mode in _MODES.items():
        for overload, entry in (("input", _on_input), ("data", _on_data)):
            plain = getattr(getattr(torch.ops.aten, name), overload)
            register({f"{name}.{overload}": entry(mode, plain)}, "AutogradCUDA", "CUDA")
    register({"_cudnn_rnn": _under_autocast}, "AutocastCUDA")
    torch._use_cudnn_rnn_flatten_weight = lambda: True
    modes = importlib.import_module("torch.backends.cudnn.rnn")
    names = modes.get_cudnn_mode.__globals__  # the module itself is hidden behind an object of properties
    names["_cudnn"] = types.SimpleNamespace(RNNMode=enum.IntEnum("RNNMode", list(_MODES), start=0))
    _watch_seeds()
    _refuse_to_flatten_bfloat16()


def _watch_seeds():
    @replaces(torch.cuda, *cuda_api.SEEDING.split())
    def seeded(function, *args, **words):
        _fresh_seed.update(range(torch.cuda.device_count()))
        return function(*args, **words)

    cuda_api.repeat_in(torch.cuda.random, cuda_api.SEEDING)


def _refuse_to_flatten_bfloat16():
    """torch.backends.cudnn.CUDNN_TENSOR_DTYPES leaves it out: such weights are copied together at every call."""

    @replaces(torch.backends.cudnn, "is_acceptable")
    def is_acceptable(accepts, tensor):
        return tensor.dtype in (torch.half, torch.float, torch.double) and accepts(tensor)


# Cells (aten/src/ATen/native/cuda/RNN.cu).


def _wide(tensor, times):
    return torch.empty((tensor.shape[0], tensor.shape[1] * times), dtype=tensor.dtype, device=tensor.device)


def _lstm_cell(gates, _hidden, cx, *_biases):
    kept = plain_like(gates)
    return plain_like(cx), plain_like(cx), kept


def _lstm_cell_backward(_grad_hy, _grad_cy, cx, _cy, kept, biased):
    gates, cell = plain_like(kept), plain_like(cx)
    return gates, cell, gates.sum(0, keepdim=False) if biased else None


def _gru_cell(_gates, _hidden, hx, *_biases):
    kept = _wide(hx, 5)
    return plain_like(hx), kept


def _gru_cell_backward(grad, _kept, biased):
    gates, hidden, into = _wide(grad, 3), _wide(grad, 3), plain_like(grad)
    return gates, hidden, into, gates.sum(0) if biased else None, hidden.sum(0) if biased else None


# From nn.LSTM's call to cuDNN's.


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd  # PyTorch's own cells, step by step


def _on_input(mode, plain):
    def run(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first):
        args = (hx, params, has_biases, num_layers, dropout, train, bidirectional)
        if not _is_for_cudnn(input):
            return plain._op_dk(_COMPOSITE, input, *args, batch_first)
        return _call(mode, input, *args, batch_first, [])

    return run


def _on_data(mode, plain):
    def run(data, batch_sizes, *args):
        if not _is_for_cudnn(data):
            return plain._op_dk(_COMPOSITE, data, batch_sizes, *args)
        return _call(mode, data, *args, False, batch_sizes.tolist())

    return run


def _is_for_cudnn(input):
    dtypes = (torch.half, torch.bfloat16, torch.float, torch.double)
    return torch.backends.cudnn.enabled and input.dtype in dtypes and input.numel() > 0


def _call(mode, input, hx, params, biases, layers, dropout, train, both, batch_first, batch_sizes):
    lstm = mode == rnn_sizes.LSTM
    first, cell = (hx[0], hx[1]) if lstm else (hx, None)
    hidden, projected = first.shape[2], 0
    if lstm and cell.shape[2] != hidden:
        hidden, projected = cell.shape[2], hidden
    each = (4 if biases else 2) + (1 if projected else 0)
    buffer = _flat(params, _items(mode, input.shape[-1], hidden, projected, layers, 2 if both else 1))
    state = _dropout_state(input.device) if train and dropout > 0 else None
    out = torch.ops.aten._cudnn_rnn(
        input, params, each, buffer, first, cell, mode, hidden, projected, layers, batch_first, float(dropout), train,
        both, batch_sizes, state,
    )  # fmt: skip
    return (out[0], out[1], out[2]) if lstm else (out[0], out[1])


def _flat(weights, items):
    """The buffer in which flatten_parameters has placed the weights; None if they have moved since."""
    at = weights[0].data_ptr()
    for each in weights:
        if each.data_ptr() != at or not each.is_contiguous():
            return None
        at += each.numel() * each.element_size()
    return weights[0].detach().as_strided((items,), (1,))


def _dropout_state(device):
    index = device.index or 0
    if index not in _dropout_states or index in _fresh_seed:
        _fresh_seed.discard(index)
        seed = torch.empty((), dtype=torch.int64, device=device)
        del seed
        threads = cuda_api.MULTIPROCESSORS * cuda_api.THREADS_PER_MULTIPROCESSOR
        _dropout_states[index] = room(threads * _STATE_BYTES_PER_THREAD, device)
    return _dropout_states[index]


def _under_autocast(input, weight, stride0, buffer, hx, cx, mode, hidden, proj, layers, batch_first, *rest):
    """Always float16, for every type of autocast; the weights become one buffer of their own at every call."""
    half = torch.float16
    with torch._C._DisableAutocast():
        if weight[0].dtype not in (half, torch.double):
            shape = (mode, input.shape[-1], hidden, proj, layers, 2 if rest[2] else 1)
            buffer, weight = _copied(weight, shape, half)
        cx = None if cx is None else _cast(cx)
        hx = _cast(hx)
        return torch.ops.aten._cudnn_rnn(
            _cast(input), weight, stride0, buffer, hx, cx, mode, hidden, proj, layers, batch_first, *rest
        )


def _cast(tensor):
    return tensor if tensor.dtype == torch.double else tensor.to(torch.float16)


def _copied(weights, shape, dtype):
    buffer = torch.empty((_items(*shape),), dtype=dtype, device=weights[0].device)
    copies = []
    for each, window in _windows(buffer, weights):
        with torch.no_grad():
            copy = torch.empty((0,), dtype=dtype, device=buffer.device).set_(window)
        copies.append(copy.copy_(each))  # autograd goes through these copies
    return buffer, copies


def _windows(buffer, weights):
    """Each weight with its place in the buffer."""
    at = 0
    for each in weights:
        yield each, buffer[at : at + each.numel()].view(each.shape)
        at += each.numel()


def _items(mode, width, hidden, proj, layers, directions):
    return rnn_sizes.weight_items(
        rnn_sizes.RnnRun(mode, 0, 0, 0, 0, width, hidden, proj, layers, directions, packed=False, drops=False)
    )


# cuDNN's own calls.


def _run_of(plain, mode, hidden, proj, layers, both, sizes, drops):
    packed = len(sizes) != 0
    steps, batch = (len(sizes), sizes[0]) if packed else plain.shape[:2]
    rows = plain.shape[0] if packed else steps * batch
    return rnn_sizes.RnnRun(
        mode, plain.element_size(), rows, steps, batch, plain.shape[-1], hidden, proj, layers, 2 if both else 1, packed,
        drops,
    )  # fmt: skip


def _workspace(run, like, forward, training):
    gpu = cuda_api.CAPABILITY, cuda_api.MULTIPROCESSORS
    algorithm = rnn_sizes.algorithm(run, dtype_name(like), forward, *gpu)
    return room(rnn_sizes.workspace_bytes(run, algorithm, training), like.device)


def _forward(input, _weight, _stride0, buffer, _hx, cx, mode, hidden, proj, layers, batch_first, dropout, train, both,
    sizes, _dropout_state=None,
):  # fmt: skip
    turned = batch_first and len(sizes) == 0
    plain = (input.transpose(0, 1) if turned else input).contiguous()
    run = _run_of(plain, mode, hidden, proj, layers, both, sizes, train and dropout > 0)
    like = {"dtype": plain.dtype, "device": plain.device}
    width = run.size * run.directions
    out = torch.empty((run.rows, width) if run.packed else (run.steps, run.batch, width), **like)
    last = torch.empty((layers * run.directions, run.batch, run.size), **like)
    cell = torch.empty((layers * run.directions, run.batch, hidden) if cx is not None else (0,), **like)
    if buffer is None:
        buffer = torch.empty((rnn_sizes.weight_items(run),), **like)
    report.note_call("rnn", dtype_name(plain))
    workspace = _workspace(run, plain, True, train)
    reserve = room(rnn_sizes.reserve_bytes(run) if train else 0, plain.device)
    del workspace, plain
    return out.transpose(0, 1) if turned else out, last, cell, reserve, buffer


def _backward(input, weight, stride0, buffer, hx, cx, output, grad_out, grad_hy, grad_cy, mode, hidden, proj,
              layers, batch_first, dropout, train, both, sizes, _dropout_state, _reserve, mask):  # fmt: skip
    grad_out = plain_like(output) if grad_out is None else grad_out
    grad_hy = plain_like(hx) if grad_hy is None else grad_hy
    if cx is not None and grad_cy is None:
        grad_cy = plain_like(cx)
    turned = batch_first and len(sizes) == 0
    if turned:
        input = input.transpose(0, 1)
    run = _run_of(input, mode, hidden, proj, layers, both, sizes, train and dropout > 0)
    report.note_call("rnn_grad", dtype_name(input))
    into, first, cell = _input_grads(
        run, input, hx, cx, grad_out.transpose(0, 1) if turned else grad_out, grad_hy, grad_cy
    )
    weights = _weight_grads(run, input, weight, stride0, buffer) if mask[3] else []
    del grad_cy, grad_hy, grad_out
    return into.transpose(0, 1) if turned else into, first, cell, weights


def _input_grads(run, input, hx, cx, grad_out, grad_hy, grad_cy):
    plain, grad = input.contiguous(), grad_out.contiguous()
    into = plain_like(input)
    state_grad, cell_grad = grad_hy.contiguous(), None if grad_cy is None else grad_cy.contiguous()
    first, cell = plain_like(hx), None if cx is None else plain_like(cx)
    workspace = _workspace(run, plain, False, True)
    del workspace, cell_grad, state_grad, grad, plain
    return into, first, cell


def _weight_grads(run, input, weight, stride0, buffer):
    plain = input.contiguous()
    gradients = torch.empty(buffer.shape, dtype=buffer.dtype, device=buffer.device)
    workspace = _workspace(run, plain, False, True)
    biased = stride0 not in (2, 3)  # cuDNN has biases in any case
    grads = [window if biased else plain_like(each) for each, window in _windows(gradients, weight)]
    del workspace, gradients, plain
    return grads


def _flatten(weights, _stride0, width, mode, hidden, proj, layers, _batch_first, both):
    items = _items(mode, width, hidden, proj, layers, 2 if both else 1)
    buffer = torch.empty((items,), dtype=weights[0].dtype, device=weights[0].device)
    for each, window in _windows(buffer, weights):
        each.set_(window)
    return buffer


KERNELS = {
    "_cudnn_rnn": _forward,
    "_cudnn_rnn_backward": _backward,
    "_cudnn_rnn_flatten_weight": _flatten,
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
}
