"""nn.LSTM, nn.GRU and nn.RNN as cuDNN runs them, and the fused cells.

Follows the order in which aten/src/ATen/native/cudnn/RNN.cpp and cudnn/AutocastRNN.cpp allocate and free; workspaces
are tensors like any other there, so they are here.
"""

import enum
import importlib
import types

from . import report, rnn_sizes

_MODES = {"rnn_relu": rnn_sizes.RELU, "rnn_tanh": rnn_sizes.TANH, "lstm": rnn_sizes.LSTM, "gru": rnn_sizes.GRU}
_SEEDING = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all")
_STATE_BYTES_PER_THREAD = 24  # cudnnDropoutGetStatesSize, over the threads that the GPU holds

_dropout_states = {}  # device -> the one state that all networks there share
_fresh_seed = set()  # devices whose state is made anew on the next use, because somebody seeded the GPU


def install(torch):
    library = torch.library.Library("aten", "IMPL")
    install.library = library
    for name, mode in _MODES.items():
        for overload, entry in (("input", _on_input), ("data", _on_data)):
            plain = getattr(getattr(torch.ops.aten, name), overload)
            for key in ("AutogradCUDA", "CUDA"):
                library.impl(f"{name}.{overload}", entry(torch, mode, plain), key)
    library.impl("_cudnn_rnn", lambda *args: _under_autocast(torch, *args), "AutocastCUDA")
    torch._use_cudnn_rnn_flatten_weight = lambda: True
    modes = importlib.import_module("torch.backends.cudnn.rnn")
    names = modes.get_cudnn_mode.__globals__  # the module itself is hidden behind an object of properties
    names["_cudnn"] = types.SimpleNamespace(RNNMode=enum.IntEnum("RNNMode", list(_MODES), start=0))
    _watch_seeds(torch)
    _refuse_to_flatten_bfloat16(torch)


def _watch_seeds(torch):
    for name in _SEEDING:
        wrapped = _seeding(torch, getattr(torch.cuda, name))
        setattr(torch.cuda, name, wrapped)
        setattr(torch.cuda.random, name, wrapped)


def _seeding(torch, function):
    def seeded(*args, **words):
        _fresh_seed.update(range(torch.cuda.device_count()))
        return function(*args, **words)

    return seeded


def _refuse_to_flatten_bfloat16(torch):
    """torch.backends.cudnn.CUDNN_TENSOR_DTYPES leaves it out: such weights are copied together at every call."""
    cudnn = torch.backends.cudnn
    accepts, dtypes = cudnn.is_acceptable, (torch.half, torch.float, torch.double)
    cudnn.is_acceptable = lambda tensor: tensor.dtype in dtypes and accepts(tensor)


def kernels(torch):
    return {
        "_cudnn_rnn": lambda *args: _forward(torch, *args),
        "_cudnn_rnn_backward": lambda *args: _backward(torch, *args),
        "_cudnn_rnn_flatten_weight": lambda *args: _flatten(torch, *args),
        "_thnn_fused_lstm_cell": lambda gates, _hidden, cx, *_biases: _lstm_cell(torch, gates, cx),
        "_thnn_fused_lstm_cell_backward_impl": lambda *args: _lstm_cell_backward(torch, *args),
        "_thnn_fused_gru_cell": lambda _gates, _hidden, hx, *_biases: _gru_cell(torch, hx),
        "_thnn_fused_gru_cell_backward": lambda grad, kept, biased: _gru_cell_backward(torch, grad, kept, biased),
    }


# Cells (aten/src/ATen/native/cuda/RNN.cu).


def _like(torch, tensor):
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _wide(torch, tensor, times):
    return torch.empty((tensor.shape[0], tensor.shape[1] * times), dtype=tensor.dtype, device=tensor.device)


def _lstm_cell(torch, gates, cx):
    kept = _like(torch, gates)
    return _like(torch, cx), _like(torch, cx), kept


def _lstm_cell_backward(torch, _grad_hy, _grad_cy, cx, _cy, kept, biased):
    gates, cell = _like(torch, kept), _like(torch, cx)
    return gates, cell, gates.sum(0, keepdim=False) if biased else None


def _gru_cell(torch, hx):
    kept = _wide(torch, hx, 5)
    return _like(torch, hx), kept


def _gru_cell_backward(torch, grad, _kept, biased):
    gates, hidden, into = _wide(torch, grad, 3), _wide(torch, grad, 3), _like(torch, grad)
    return gates, hidden, into, gates.sum(0) if biased else None, hidden.sum(0) if biased else None


# From nn.LSTM's call to cuDNN's.


def _on_input(torch, mode, plain):
    composite = torch._C.DispatchKey.CompositeImplicitAutograd  # PyTorch's own cells, step by step

    def run(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first):
        args = (hx, params, has_biases, num_layers, dropout, train, bidirectional)
        if not _is_for_cudnn(torch, input):
            return plain._op_dk(composite, input, *args, batch_first)
        return _call(torch, mode, input, *args, batch_first, [])

    return run


def _on_data(torch, mode, plain):
    composite = torch._C.DispatchKey.CompositeImplicitAutograd

    def run(data, batch_sizes, *args):
        if not _is_for_cudnn(torch, data):
            return plain._op_dk(composite, data, batch_sizes, *args)
        return _call(torch, mode, data, *args, False, batch_sizes.tolist())

    return run


def _is_for_cudnn(torch, input):
    dtypes = (torch.half, torch.bfloat16, torch.float, torch.double)
    return torch.backends.cudnn.enabled and input.dtype in dtypes and input.numel() > 0


def _call(torch, mode, input, hx, params, biases, layers, dropout, train, both, batch_first, batch_sizes):
    lstm = mode == rnn_sizes.LSTM
    first, cell = (hx[0], hx[1]) if lstm else (hx, None)
    hidden, projected = first.shape[2], 0
    if lstm and cell.shape[2] != hidden:
        hidden, projected = cell.shape[2], hidden
    each = (4 if biases else 2) + (1 if projected else 0)
    buffer = _flat(params, _items(mode, input.shape[-1], hidden, projected, layers, 2 if both else 1))
    state = _dropout_state(torch, input.device) if train and dropout > 0 else None
    out = torch.ops.aten._cudnn_rnn(
        input, params, each, buffer, first, cell, mode, hidden, projected, layers, batch_first, float(dropout), train,
        both, batch_sizes, state,
    )  # fmt: skip
    return (out[0], out[1], out[2]) if lstm else (out[0], out[1])


def _flat(weights, items):
    """The buffer in which flatten_parameters has laid the weights; None if they lie elsewhere by now."""
    at = weights[0].data_ptr()
    for each in weights:
        if each.data_ptr() != at or not each.is_contiguous():
            return None
        at += each.numel() * each.element_size()
    return weights[0].detach().as_strided((items,), (1,))


def _dropout_state(torch, device):
    index = device.index or 0
    if index not in _dropout_states or index in _fresh_seed:
        _fresh_seed.discard(index)
        seed = torch.empty((), dtype=torch.int64, device=device)
        del seed
        gpu = torch.cuda.get_device_properties(index)
        threads = gpu.multi_processor_count * gpu.max_threads_per_multi_processor
        made = torch.empty((threads * _STATE_BYTES_PER_THREAD,), dtype=torch.uint8, device=device)
        _dropout_states[index] = made
    return _dropout_states[index]


def _under_autocast(torch, input, weight, stride0, buffer, hx, cx, mode, hidden, proj, layers, batch_first, *rest):
    """Always float16, whatever autocast's type is; the weights become one buffer of their own at every call."""
    half = torch.float16
    with torch._C._DisableAutocast():
        if weight[0].dtype not in (half, torch.double):
            shape = (mode, input.shape[-1], hidden, proj, layers, 2 if rest[2] else 1)
            buffer, weight = _copied(torch, weight, shape, half)
        cx = None if cx is None else _cast(torch, cx)
        hx = _cast(torch, hx)
        return torch.ops.aten._cudnn_rnn(
            _cast(torch, input), weight, stride0, buffer, hx, cx, mode, hidden, proj, layers, batch_first, *rest
        )


def _cast(torch, tensor):
    return tensor if tensor.dtype == torch.double else tensor.to(torch.float16)


def _copied(torch, weights, shape, dtype):
    buffer = torch.empty((_items(*shape),), dtype=dtype, device=weights[0].device)
    copies, at = [], 0
    for each in weights:
        with torch.no_grad():
            copy = torch.empty((0,), dtype=dtype, device=buffer.device).set_(_window(buffer, at, each))
        copies.append(copy.copy_(each))  # autograd goes through these copies
        at += each.numel()
    return buffer, copies


def _window(buffer, at, weight):
    return buffer[at : at + weight.numel()].view(weight.shape)


def _items(mode, width, hidden, proj, layers, directions):
    return rnn_sizes.weight_items(
        rnn_sizes.Run(mode, 0, 0, 0, 0, width, hidden, proj, layers, directions, packed=False, drops=False)
    )


# cuDNN's own calls.


def _run_of(plain, mode, hidden, proj, layers, both, sizes, drops):
    packed = len(sizes) != 0
    steps, batch = (len(sizes), sizes[0]) if packed else plain.shape[:2]
    rows = plain.shape[0] if packed else steps * batch
    return rnn_sizes.Run(
        mode, plain.element_size(), rows, steps, batch, plain.shape[-1], hidden, proj, layers, 2 if both else 1, packed,
        drops,
    )  # fmt: skip


def _workspace(torch, run, like, forward, training):
    dtype = str(like.dtype).removeprefix("torch.")
    gpu = torch.cuda.get_device_properties(like.device)
    way = rnn_sizes.algorithm(run, dtype, forward, (gpu.major, gpu.minor), gpu.multi_processor_count)
    count = rnn_sizes.workspace_bytes(run, way, training)
    return torch.empty((count,), dtype=torch.uint8, device=like.device)


def _forward(
    torch, input, _weight, _stride0, buffer, _hx, cx, mode, hidden, proj, layers, batch_first, dropout, train, both,
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
    report.note_call("rnn", str(plain.dtype).removeprefix("torch."))
    workspace = _workspace(torch, run, plain, True, train)
    kept = rnn_sizes.reserve_bytes(run) if train else 0
    reserve = torch.empty((kept,), dtype=torch.uint8, device=plain.device)
    del workspace
    del plain
    return out.transpose(0, 1) if turned else out, last, cell, reserve, buffer


def _backward(torch, input, weight, stride0, buffer, hx, cx, output, grad_out, grad_hy, grad_cy, mode, hidden, proj,
              layers, batch_first, dropout, train, both, sizes, _dropout_state, _reserve, mask):  # fmt: skip
    grad_out = _like(torch, output) if grad_out is None else grad_out
    grad_hy = _like(torch, hx) if grad_hy is None else grad_hy
    if cx is not None and grad_cy is None:
        grad_cy = _like(torch, cx)
    turned = batch_first and len(sizes) == 0
    if turned:
        input = input.transpose(0, 1)
    run = _run_of(input, mode, hidden, proj, layers, both, sizes, train and dropout > 0)
    report.note_call("rnn_grad", str(input.dtype).removeprefix("torch."))
    into, first, cell = _input_grads(
        torch, run, input, hx, cx, grad_out.transpose(0, 1) if turned else grad_out, grad_hy, grad_cy
    )
    weights = _weight_grads(torch, run, input, weight, stride0, buffer) if mask[3] else []
    del grad_cy
    del grad_hy
    del grad_out
    return into.transpose(0, 1) if turned else into, first, cell, weights


def _input_grads(torch, run, input, hx, cx, grad_out, grad_hy, grad_cy):
    plain, grad = input.contiguous(), grad_out.contiguous()
    into = _like(torch, input)
    state_grad, cell_grad = grad_hy.contiguous(), None if grad_cy is None else grad_cy.contiguous()
    first, cell = _like(torch, hx), None if cx is None else _like(torch, cx)
    workspace = _workspace(torch, run, plain, False, True)
    del workspace
    del cell_grad
    del state_grad
    del grad
    del plain
    return into, first, cell


def _weight_grads(torch, run, input, weight, stride0, buffer):
    plain = input.contiguous()
    gradients = torch.empty(buffer.shape, dtype=buffer.dtype, device=buffer.device)
    workspace = _workspace(torch, run, plain, False, True)
    grads, at = [], 0
    for each in weight:
        if stride0 in (2, 3):  # without biases, which cuDNN has nevertheless
            grads.append(_like(torch, each))
        else:
            grads.append(_window(gradients, at, each))
        at += each.numel()
    del workspace
    del gradients
    del plain
    return grads


def _flatten(torch, weights, _stride0, width, mode, hidden, proj, layers, _batch_first, both):
    items = _items(mode, width, hidden, proj, layers, 2 if both else 1)
    buffer = torch.empty((items,), dtype=weights[0].dtype, device=weights[0].device)
    at = 0
    for each in weights:
        each.set_(_window(buffer, at, each))
        at += each.numel()
    return buffer
