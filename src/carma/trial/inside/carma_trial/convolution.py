"""Convolutions as at::native::_convolution and convolution_backward run them on a GPU, by cuDNN where they use it."""

import typing

import torch

from . import report
from .kernels import dtype_name, plain_like

_suggest = torch._prims_common.suggest_memory_format


class Geometry(typing.NamedTuple):
    stride: tuple
    padding: tuple
    dilation: tuple
    groups: int

    def output(self, image, weight, transposed_by=None):
        """The shape of the result; `transposed_by`: the output padding of a transposed convolution."""
        spatial = []
        for dim, (stride, padding, dilation) in enumerate(zip(self.stride, self.padding, self.dilation)):
            size, kernel = image.shape[2 + dim], dilation * (weight.shape[2 + dim] - 1) + 1
            if transposed_by is not None:
                spatial.append((size - 1) * stride - 2 * padding + kernel + transposed_by[dim])
            else:
                spatial.append((size + 2 * padding - kernel) // stride + 1)
        channels = weight.shape[0] if transposed_by is None else weight.shape[1] * self.groups
        return (image.shape[0], channels, *spatial)


def _forward(self, weight, padding, stride, dilation, groups, benchmark, deterministic, allow_tf32):
    geometry = Geometry(stride, padding, dilation, groups)
    return _run("conv", self, weight, geometry.output(self, weight), geometry, allow_tf32)


def _transposed(self, weight, padding, output_padding, stride, dilation, groups, benchmark, deterministic, allow_tf32):
    geometry = Geometry(stride, padding, dilation, groups)
    return _run("conv_input_grad", self, weight, geometry.output(self, weight, output_padding), geometry, allow_tf32)


def _depthwise(self, weight, kernel_size, bias, stride, padding, dilation):
    plain, held = self.contiguous(), weight.contiguous()
    shape = Geometry(stride, padding, dilation, self.shape[1]).output(self, weight)
    del held
    return torch.empty(shape, dtype=plain.dtype, device=plain.device)


def _layout(one, other):
    """cudnn_conv_suggest_memory_format: channels last if either side is."""
    for tensor in (one, other):
        for ndim, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
            if tensor.ndim == ndim and _suggest(tensor) == layout:
                return layout
    return torch.contiguous_format


def _note(op, image, weight, output, geometry, layout, allow_tf32):
    cudnn = torch.backends.cudnn
    flags = {
        "channels_last": layout != torch.contiguous_format,
        "tf32": allow_tf32,
        "benchmark": cudnn.benchmark,
        "deterministic": cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
    }
    report.note_call(
        op,
        dtype_name(image),
        sizes=(image.shape, weight.shape, output.shape),
        numbers=(*geometry.stride, *geometry.padding, *geometry.dilation, geometry.groups),
        flags=tuple(name for name, is_set in flags.items() if is_set),
    )


def _run(op, self, weight, shape, geometry, allow_tf32):
    layout = _layout(self, weight)
    out = torch.empty(shape, dtype=self.dtype, device=self.device, memory_format=layout)
    if out.numel() == 0:
        return out
    held = weight.contiguous(memory_format=layout)
    image, result = (self, out) if op == "conv" else (out, self)
    _note(op, image, held, result, geometry, layout, allow_tf32)
    return out


def _backward(grad, self, weight, bias_sizes, stride, padding, dilation, transposed, out_padding, groups, mask):
    flat = weight.ndim == 3
    if flat:  # one dimension is run as two
        grad, self, weight = (each.contiguous().unsqueeze(2) for each in (grad, self, weight))
        stride, padding, dilation, out_padding = [1, *stride], [0, *padding], [1, *dilation], [0, *out_padding]
    backend = torch._C._select_conv_backend(
        self, weight, None, stride, padding, dilation, transposed, out_padding, groups, bias_sizes
    )
    if str(backend).rpartition(".")[2] in ("Cudnn", "CudnnTranspose"):
        geometry = Geometry(stride, padding, dilation, groups)
        into, held = _cudnn_backward(grad, self, weight, geometry, transposed, mask)
    else:
        held = plain_like(weight) if mask[1] else None
        into = plain_like(self) if mask[0] else None
    bias = grad.sum([0, *range(2, grad.ndim)]) if mask[2] else None
    if flat:
        into, held = (None if each is None else each.squeeze(2) for each in (into, held))
    return into, held, bias


def _cudnn_backward(grad, self, weight, geometry, transposed, mask):
    allow_tf32 = torch.backends.cudnn.allow_tf32
    self = self.contiguous(memory_format=_layout(self, weight))
    grad = grad.contiguous(memory_format=_suggest(self))
    into = made = None
    if mask[0]:
        layout = _layout(grad, weight)
        into = torch.empty(self.shape, dtype=self.dtype, device=self.device, memory_format=layout)
        held = weight.contiguous(memory_format=layout)
        if transposed:
            _note("conv", grad, held, into, geometry, layout, allow_tf32)
        else:
            _note("conv_input_grad", into, held, grad, geometry, layout, allow_tf32)
        del held
    if mask[1]:
        layout = _layout(self, grad)
        there, here = grad.contiguous(memory_format=layout), self.contiguous(memory_format=layout)
        made = torch.empty(weight.shape, dtype=grad.dtype, device=grad.device, memory_format=layout)
        image, result = (there, here) if transposed else (here, there)
        _note("conv_weight_grad", image, made, result, geometry, layout, allow_tf32)
    return into, made


KERNELS = {
    "cudnn_convolution": _forward,
    "cudnn_convolution_transpose": _transposed,
    "_conv_depthwise2d": _depthwise,
    "conv_depthwise3d": _depthwise,
    "convolution_backward": _backward,
}
