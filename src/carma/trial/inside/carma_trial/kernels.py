"""Kernels that need more than their shapes: convolutions, attention, and whatever depends on values.

Each follows the order in which PyTorch's own CUDA code allocates (aten/src/ATen/native: Convolution.cpp,
cudnn/Conv_v8.cpp, transformers/attention.cpp, TensorAdvancedIndexing.cpp); what the library takes besides is left as a
call in the events.
"""

import sys

from . import attention, convolution, encoder, evaluation, report, rnn, scratch

_answers = {}  # of made-up truths: how often a line of the script has asked
_FLIPS = 20


def overrides(torch, gpu):
    """op -> kernel, for the CUDA key."""
    return {
        **encoder.kernels(torch, attention.capability_of(gpu)),
        **convolution.kernels(torch),
        **rnn.kernels(torch),
        **attention.kernels(torch),
        **scratch.kernels(torch),
        "_local_scalar_dense": lambda self: _item(torch, self),
        "equal": lambda one, other: _equal(torch, one, other),
        "nonzero": lambda self: _nonzero(torch, self),
        "masked_select": lambda self, mask: _masked_select(torch, self, mask),
        "_unique2": lambda self, *rest, **words: _unique(torch, self, *rest, **words),
        "unique_dim": lambda self, dim, *rest, **words: _as_long(torch, self, self.shape[dim]),
        "unique_consecutive": lambda self, *rest, **words: _as_long(torch, self, self.numel()),
        "index.Tensor": lambda self, indices: _index(torch, self, indices),
        "_index_put_impl_": lambda self, indices, values, *rest: _index_put(torch, self, indices, values, *rest),
        "repeat_interleave.Tensor": lambda repeats, output_size=None: _repeat(torch, repeats, output_size),
        "_use_cudnn_ctc_loss": lambda *_rest: False,
        "_use_cudnn_ctc_loss.Tensor": lambda *_rest: False,
        "_use_miopen_ctc_loss": lambda *_rest: False,
        "_use_miopen_ctc_loss.Tensor": lambda *_rest: False,
        "bincount": lambda self, weights=None, minlength=0: _bincount(torch, self, weights, minlength),
    }


def install(torch, own, gpu):
    library = torch.library.Library("aten", "IMPL")
    report.facts.setdefault("steps", 0)
    for name, kernel in own.items():
        _register(library, name, kernel, "CUDA")
    attention.install(torch, library, gpu)
    install.library = library  # kept alive


def of_libraries(torch):
    """Kernels for ops of other libraries whose results depend on values."""
    if torch._C._dispatch_has_kernel("torchvision::nms") and not hasattr(of_libraries, "library"):
        of_libraries.library = torch.library.Library("torchvision", "IMPL")
        _register(of_libraries.library, "nms", lambda *given: _best_boxes(torch, *given), "CUDA")


def _best_boxes(torch, boxes, scores, overlap):
    """How many are left decides all that follows: with all of them, estimates came out 17 to 43 % too low."""
    known = [torch.ops.carma.shadow(each) for each in (boxes, scores)]
    if all(each is not None for each in known):
        return _given(torch, torch.ops.torchvision.nms(*known, overlap), boxes)
    if not evaluation.reached():
        report.refuse("unsupported", "the model picks boxes by their scores (nms), which only a GPU knows")
    _guessed()
    return torch.arange(boxes.shape[0], device=boxes.device)


def _register(library, name, kernel, key):
    try:
        library.impl(name, kernel, key, allow_override=True)
    except TypeError:  # before torch 2.6
        library.impl(name, kernel, key)


# Values.


def _item(torch, self):
    known = torch.ops.carma.shadow(self)
    if known is not None:
        return known.item()
    if self.dtype == torch.bool:
        return _truth()
    return 0.5 if self.dtype.is_floating_point else 1


def _truth():
    """No, unless the same line asks over and over: then it waits for a yes."""
    frame = sys._getframe(1)
    while frame is not None and "carma_trial" in frame.f_code.co_filename:
        frame = frame.f_back
    where = (frame.f_code.co_filename, frame.f_lineno) if frame else None
    _answers[where] = _answers.get(where, 0) + 1
    return (_answers[where] // _FLIPS) % 2 == 1


def _equal(torch, one, other):
    if one.shape != other.shape:
        return False
    first, second = torch.ops.carma.shadow(one), torch.ops.carma.shadow(other)
    return torch.equal(first, second) if first is not None and second is not None else _truth()


# Sizes that depend on values: true where the values are known, else the most it can be.


def _guessed():
    report.flags.add("guessed_sizes")


def _given(torch, result, like):
    made = torch.empty(result.shape, dtype=result.dtype, device=like.device)
    torch.ops.carma.remember(made, result)
    return made


def _nonzero(torch, self):
    known = torch.ops.carma.shadow(self)
    if known is not None:
        return _given(torch, known.nonzero(), self)
    _guessed()
    return torch.empty_strided(
        (self.numel(), self.ndim), (1, max(1, self.numel())), dtype=torch.int64, device=self.device
    )


def _masked_select(torch, self, mask):
    values, chosen = torch.broadcast_tensors(self, mask)
    known = torch.ops.carma.shadow(chosen)
    if known is None:
        _guessed()
    count = values.numel() if known is None else int(known.sum())
    where = torch.empty((count, values.ndim), dtype=torch.int64, device=self.device)
    del where
    return torch.empty((count,), dtype=self.dtype, device=self.device)


def _unique(torch, self, sorted=True, return_inverse=False, return_counts=False):
    known = torch.ops.carma.shadow(self)
    if known is not None:
        found = torch.ops.aten._unique2(known, sorted, return_inverse, return_counts)
        return tuple(_given(torch, each, self) for each in found)
    return _as_long(torch, self, self.numel())


def _as_long(torch, self, count):
    _guessed()
    long = {"dtype": torch.int64, "device": self.device}
    return (
        torch.empty((count,), dtype=self.dtype, device=self.device),
        torch.empty(self.shape, **long),
        torch.empty((count,), **long),
    )


def _as_positions(torch, indices):
    """Masks become positions, as in at::native::expandTensors."""
    positions = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            where = torch.ops.aten.nonzero(index)
            positions.extend(where.select(1, dim) for dim in range(index.ndim))
        else:
            positions.append(index)
    return positions


def _index(torch, self, indices):
    positions = [None if p is None else p.to(self.device) for p in _as_positions(torch, indices)]
    like = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
    shape = torch.ops.aten.index.Tensor(like, [None if p is None else _meta(torch, p) for p in positions])
    out = torch.empty_strided(shape.shape, shape.stride(), dtype=self.dtype, device=self.device)
    known = torch.ops.carma.shadow(self) if out.numel() <= 1 << 18 else None
    values = [None if p is None else torch.ops.carma.shadow(p) for p in positions] if known is not None else [False]
    if known is not None and all((v is None) == (p is None) for v, p in zip(values, positions)):
        torch.ops.carma.remember(out, torch.ops.aten.index.Tensor(known, values))
    return out


def _meta(torch, tensor):
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _index_put(torch, self, indices, values, accumulate=False, unsafe=False):
    positions = _as_positions(torch, indices)
    torch.ops.carma.forget(self)
    if accumulate and any(position is not None for position in positions):
        scratch.added_by_index(torch, self, values, positions)
    return self


def _repeat(torch, repeats, output_size):
    known = torch.ops.carma.shadow(repeats)
    if known is not None:
        return _given(torch, torch.repeat_interleave(known), repeats)
    if output_size is None:
        report.refuse("unsupported", "the script repeats rows by numbers that are only known on the GPU")
    return torch.empty((output_size,), dtype=repeats.dtype, device=repeats.device)


def _bincount(torch, self, weights, minlength):
    known = torch.ops.carma.shadow(self)
    count = max(minlength, 1) if known is None else max(minlength, int(known.max()) + 1 if known.numel() else 0)
    dtype = torch.int64 if weights is None else torch.float64
    return torch.empty((count,), dtype=dtype, device=self.device)
