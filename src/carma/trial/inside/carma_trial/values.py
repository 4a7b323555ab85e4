"""What depends on the values of tensors on the emulated GPU, which are mostly unknown.

Small tensors whose values follow from known ones have them (`_known`). Of others a value is invented, and a size that
depends on values is the largest possible. Sizes and order of allocations are those of PyTorch's TensorAdvancedIndexing.
"""

import functools
import sys

import torch

from . import evaluation, kernels, replaces, report

_FLIPS = 20
_MOST = 1 << 18  # elements of a tensor whose values are known
_truths_of = {}  # number of truth values that each line of the script has requested


def install():
    for answer, names in ((True, ("isfinite",)), (False, ("isnan", "isinf", "isposinf", "isneginf"))):
        replaces(torch, *names)(functools.partial(_healthy, answer))
        for name in names:
            setattr(torch.Tensor, name, getattr(torch, name))

    @replaces(torch.Tensor, "all")
    def all(whole, self, *args, **words):
        found = whole(self, *args, **words)
        return _filled(found, True) if getattr(self, "_carma_true", False) else found

    torch.all = lambda input, *args, **words: torch.Tensor.all(input, *args, **words)


def _known(tensor):
    """The values on the CPU; None if they are unknown."""
    return torch.ops.carma.shadow(tensor)


def _given(result, like):
    made = torch.empty(result.shape, dtype=result.dtype, device=like.device)
    torch.ops.carma.remember(made, result)
    return made


# In a healthy training all numbers are finite.


def _healthy(answer, function, input, *args, **words):
    found = function(input, *args, **words)
    if not isinstance(found, torch.Tensor) or not found.is_cuda or _known(input) is not None:
        return found
    if answer:
        found._carma_true = True  # for large ones, which carry no values
    return _filled(found, answer)


def _filled(found, answer):
    if found.is_cuda and found.numel() <= _MOST:
        torch.ops.carma.remember(found, torch.full(found.shape, answer))
    return found


# One value.


def _item(self):
    known = _known(self)
    if known is not None:
        return known.item()
    if self.dtype == torch.bool:
        return _truth()
    return 0.5 if self.dtype.is_floating_point else 1


def _truth():
    """False, unless the same line of the script requests it repeatedly: the script then waits for True."""
    frame = sys._getframe(1)
    while frame is not None and "carma_trial" in frame.f_code.co_filename:
        frame = frame.f_back
    line = (frame.f_code.co_filename, frame.f_lineno) if frame else None
    _truths_of[line] = _truths_of.get(line, 0) + 1
    return (_truths_of[line] // _FLIPS) % 2 == 1


def _equal(one, other):
    if one.shape != other.shape:
        return False
    first, second = _known(one), _known(other)
    return torch.equal(first, second) if first is not None and second is not None else _truth()


# Sizes that depend on values.


def _guessed():
    report.flags.add("guessed_sizes")


def _nonzero(self):
    known = _known(self)
    if known is not None:
        return _given(known.nonzero(), self)
    _guessed()
    shape, strides = (self.numel(), self.ndim), (1, max(1, self.numel()))
    return torch.empty_strided(shape, strides, dtype=torch.int64, device=self.device)


def _masked_select(self, mask):
    values, chosen = torch.broadcast_tensors(self, mask)
    known = _known(chosen)
    if known is None:
        _guessed()
    count = values.numel() if known is None else int(known.sum())
    positions = torch.empty((count, values.ndim), dtype=torch.int64, device=self.device)
    del positions
    return torch.empty((count,), dtype=self.dtype, device=self.device)


def _unique(self, sorted=True, return_inverse=False, return_counts=False):
    known = _known(self)
    if known is not None:
        found = torch.ops.aten._unique2(known, sorted, return_inverse, return_counts)
        return tuple(_given(each, self) for each in found)
    return _unique_at_most(self, self.numel())


def _unique_at_most(self, count):
    _guessed()
    long = {"dtype": torch.int64, "device": self.device}
    values = torch.empty((count,), dtype=self.dtype, device=self.device)
    return values, torch.empty(self.shape, **long), torch.empty((count,), **long)


def _as_positions(indices):
    """Masks become positions, as in at::native::expandTensors."""
    positions = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            where = torch.ops.aten.nonzero(index)
            positions.extend(where.select(1, dim) for dim in range(index.ndim))
        else:
            positions.append(index)
    return positions


def _index(self, indices):
    positions = [None if p is None else p.to(self.device) for p in _as_positions(indices)]
    shape = torch.ops.aten.index.Tensor(_meta(self), [None if p is None else _meta(p) for p in positions])
    out = torch.empty_strided(shape.shape, shape.stride(), dtype=self.dtype, device=self.device)
    known = _known(self) if out.numel() <= _MOST else None
    if known is not None:
        values = [None if p is None else _known(p) for p in positions]
        if all((v is None) == (p is None) for v, p in zip(values, positions)):
            torch.ops.carma.remember(out, torch.ops.aten.index.Tensor(known, values))
    return out


def _meta(tensor):
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _index_put(self, indices, values, accumulate=False, unsafe=False):
    positions = _as_positions(indices)
    torch.ops.carma.forget(self)
    if accumulate and any(position is not None for position in positions):
        kernels.added_by_index(self, values, positions)
    return self


def _repeat(repeats, output_size=None):
    known = _known(repeats)
    if known is not None:
        return _given(torch.repeat_interleave(known), repeats)
    if output_size is None:
        report.refuse("unsupported", "the script repeats rows by counts that only a GPU computes")
    return torch.empty((output_size,), dtype=repeats.dtype, device=repeats.device)


def _bincount(self, weights=None, minlength=0):
    known = _known(self)
    count = max(minlength, 1) if known is None else max(minlength, int(known.max()) + 1 if known.numel() else 0)
    dtype = torch.int64 if weights is None else torch.float64
    return torch.empty((count,), dtype=dtype, device=self.device)


def _best_boxes(boxes, scores, overlap):
    """How many boxes remain decides all that follows: with all of them, estimates were 17 to 43 % too low."""
    known = [_known(each) for each in (boxes, scores)]
    if all(each is not None for each in known):
        return _given(torch.ops.torchvision.nms(*known, overlap), boxes)
    if not evaluation.reached():
        report.refuse("unsupported", "the model selects boxes by scores (nms) that only a GPU computes")
    _guessed()
    return torch.arange(boxes.shape[0], device=boxes.device)


def register_library_kernels():
    """Kernels of operators that a library loaded later brings."""
    if torch._C._dispatch_has_kernel("torchvision::nms") and "torchvision" not in kernels.libraries:
        kernels.register({"nms": _best_boxes}, "CUDA", space="torchvision")


KERNELS = {
    "_local_scalar_dense": _item,
    "equal": _equal,
    "nonzero": _nonzero,
    "masked_select": _masked_select,
    "_unique2": _unique,
    "unique_dim": lambda self, dim, *_rest, **_words: _unique_at_most(self, self.shape[dim]),
    "unique_consecutive": lambda self, *_rest, **_words: _unique_at_most(self, self.numel()),
    "index.Tensor": _index,
    "_index_put_impl_": _index_put,
    "repeat_interleave.Tensor": _repeat,
    "bincount": _bincount,
    **dict.fromkeys(
        (f"_use_{library}_ctc_loss{kind}" for library in ("cudnn", "miopen") for kind in ("", ".Tensor")),
        lambda *_rest: False,
    ),
}
