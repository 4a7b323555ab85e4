"""Convolutions as at::native::_convolution and convolution_backward run them on a GPU, by cuDNN where they use it."""

from . import report


def kernels(torch):
    aten = torch.ops.aten

    def forward(self, weight, padding, stride, dilation, groups, benchmark, deterministic, allow_tf32):
        where = _shape_of(torch, self, weight, stride, padding, dilation, False, (0,) * len(stride), groups)
        return _run(torch, "conv", self, weight, where, stride, padding, dilation, groups, allow_tf32)

    def transposed(
        self, weight, padding, output_padding, stride, dilation, groups, benchmark, deterministic, allow_tf32
    ):
        where = _shape_of(torch, self, weight, stride, padding, dilation, True, output_padding, groups)
        return _run(torch, "conv_input_grad", self, weight, where, stride, padding, dilation, groups, allow_tf32)

    def depthwise(self, weight, kernel_size, bias, stride, padding, dilation):
        plain, held = self.contiguous(), weight.contiguous()
        shape = _shape_of(torch, self, weight, stride, padding, dilation, False, (0,) * len(stride), self.shape[1])
        del held
        return torch.empty(shape, dtype=plain.dtype, device=plain.device)

    def backward(grad, self, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, mask):
        return _backward(
            torch, grad, self, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, mask
        )

    del aten
    return {
        "cudnn_convolution": forward,
        "cudnn_convolution_transpose": transposed,
        "_conv_depthwise2d": depthwise,
        "conv_depthwise3d": depthwise,
        "convolution_backward": backward,
    }


def _shape_of(torch, self, weight, stride, padding, dilation, transposed, output_padding, groups):
    spatial = []
    for dim in range(len(stride)):
        size, kernel = self.shape[2 + dim], dilation[dim] * (weight.shape[2 + dim] - 1) + 1
        if transposed:
            spatial.append((size - 1) * stride[dim] - 2 * padding[dim] + kernel + output_padding[dim])
        else:
            spatial.append((size + 2 * padding[dim] - kernel) // stride[dim] + 1)
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    return (self.shape[0], channels, *spatial)


def _suggested(torch, one, other):
    """cudnn_conv_suggest_memory_format: channels last if either side is."""
    for tensor in (one, other):
        if tensor.ndim == 4 and _is_last(torch, tensor, torch.channels_last):
            return torch.channels_last
        if tensor.ndim == 5 and _is_last(torch, tensor, torch.channels_last_3d):
            return torch.channels_last_3d
    return torch.contiguous_format


def _is_last(torch, tensor, memory_format):
    return torch._prims_common.suggest_memory_format(tensor) == memory_format


def _flags(torch, layout, allow_tf32):
    cudnn = torch.backends.cudnn
    return tuple(
        name
        for name, said in (
            ("channels_last", layout != torch.contiguous_format),
            ("tf32", allow_tf32),
            ("benchmark", cudnn.benchmark),
            ("deterministic", cudnn.deterministic or torch.are_deterministic_algorithms_enabled()),
        )
        if said
    )


def _note(torch, op, image, weight, output, stride, padding, dilation, groups, layout, allow_tf32):
    report.note_call(
        op,
        str(image.dtype).removeprefix("torch."),
        sizes=(image.shape, weight.shape, output.shape),
        numbers=(*stride, *padding, *dilation, groups),
        flags=_flags(torch, layout, allow_tf32),
    )


def _run(torch, op, self, weight, shape, stride, padding, dilation, groups, allow_tf32):
    layout = _suggested(torch, self, weight)
    out = torch.empty(shape, dtype=self.dtype, device=self.device, memory_format=layout)
    if out.numel() == 0:
        return out
    held = weight.contiguous(memory_format=layout)
    image, result = (self, out) if op == "conv" else (out, self)
    _note(torch, op, image, held, result, stride, padding, dilation, groups, layout, allow_tf32)
    return out


def _backward(torch, grad, self, weight, bias_sizes, stride, padding, dilation, transposed, out_padding, groups, mask):
    flat = weight.ndim == 3
    if flat:  # one dimension is run as two
        grad, self, weight = (each.contiguous().unsqueeze(2) for each in (grad, self, weight))
        stride, padding, dilation, out_padding = [1, *stride], [0, *padding], [1, *dilation], [0, *out_padding]
    backend = torch._C._select_conv_backend(
        self, weight, None, stride, padding, dilation, transposed, out_padding, groups, bias_sizes
    )
    if str(backend).rpartition(".")[2] in ("Cudnn", "CudnnTranspose"):
        into, held = _cudnn_backward(torch, grad, self, weight, stride, padding, dilation, transposed, groups, mask)
    else:
        held = torch.empty_like(weight, memory_format=torch.contiguous_format) if mask[1] else None
        into = torch.empty_like(self, memory_format=torch.contiguous_format) if mask[0] else None
    bias = grad.sum([0, *range(2, grad.ndim)]) if mask[2] else None
    if flat:
        into = None if into is None else into.squeeze(2)
        held = None if held is None else held.squeeze(2)
    return into, held, bias


def _cudnn_backward(torch, grad, self, weight, stride, padding, dilation, transposed, groups, mask):
    allow_tf32 = torch.backends.cudnn.allow_tf32
    layout = _suggested(torch, self, weight)
    self = self.contiguous(memory_format=layout)
    grad = grad.contiguous(memory_format=torch._prims_common.suggest_memory_format(self))
    rest = (stride, padding, dilation, groups)
    into = made = None
    if mask[0]:
        layout = _suggested(torch, grad, weight)
        into = torch.empty(self.shape, dtype=self.dtype, device=self.device, memory_format=layout)
        held = weight.contiguous(memory_format=layout)
        if transposed:
            _note(torch, "conv", grad, held, into, *rest, layout, allow_tf32)
        else:
            _note(torch, "conv_input_grad", into, held, grad, *rest, layout, allow_tf32)
        del held
    if mask[1]:
        layout = _suggested(torch, self, grad)
        there, here = grad.contiguous(memory_format=layout), self.contiguous(memory_format=layout)
        made = torch.empty(weight.shape, dtype=grad.dtype, device=grad.device, memory_format=layout)
        image, result = (there, here) if transposed else (here, there)
        _note(torch, "conv_weight_grad", image, made, result, *rest, layout, allow_tf32)
    return into, made
