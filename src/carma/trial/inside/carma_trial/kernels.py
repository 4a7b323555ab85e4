"""Registration of kernels, and the kernels whose temporaries are larger than their results.

These are losses, gradients of embeddings, and sorting. Sizes and order follow PyTorch's CUDA code:
aten/src/ATen/native/Loss.cpp and cuda/Loss.cu (a loss is first computed for each element, in the storage that the
result keeps), cuda/Embedding*.cu, cuda/Indexing.cu, cuda/Sort.cpp.
"""

import math

import torch

libraries = {}  # torch forgets the kernels of a library object that is gone
_FEW_INDICES = 3072  # the gradient of an embedding with at most this many indices needs no sorting
_ROWS_TOGETHER = 10  # of a sorted gradient that are summed by one warp
_ONE_TILE = 2048  # elements that are sorted without further memory (the limit was observed between 1000 and 2401)
_OFTEN = 32  # for an index that occurs more often, sums go into the gradient (observed between 16 and 41)


def register(kernels, *keys, space="aten"):
    """`kernels`: function by operator. `keys`: of torch's dispatcher."""
    if space not in libraries:
        libraries[space] = torch.library.Library(space, "IMPL")
    for name, kernel in kernels.items():
        for key in keys:
            try:
                libraries[space].impl(name, kernel, key, allow_override=True)
            except TypeError:  # before torch 2.6
                libraries[space].impl(name, kernel, key)


def plain_like(tensor):
    """A contiguous tensor of the same shape."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def room(count, device):
    """A tensor of `count` bytes."""
    return torch.empty((count,), dtype=torch.uint8, device=device)


def dtype_name(tensor):
    return str(tensor.dtype).removeprefix("torch.")


def _pair_loss(self, target, reduction=1, beta=1.0):
    shape = torch.broadcast_shapes(self.shape, target.shape)
    out = torch.empty(shape, dtype=torch.result_type(self, target), device=self.device)
    if reduction == 0:
        return out
    each = torch.empty_like(out)
    out.resize_(())  # keeps its storage
    reduce = torch.mean if reduction == 1 else torch.sum
    return reduce(each, (), out=out)


def _reduced(each, reduction):
    return each if reduction == 0 else each.mean() if reduction == 1 else each.sum()


def _huber_loss(self, target, reduction=1, delta=1.0):
    return _reduced(torch.empty_like(self), reduction)


def _binary_loss(self, target, weight=None, reduction=1):
    each = torch.empty_like(self)
    if reduction == 0:
        return each
    _reduced(each, reduction)
    return each.resize_(())


def sort_bytes(count, item_bytes=8, bits=64):
    """cub::DeviceRadixSort::SortPairs: 8 bits a pass, a histogram for each; with several passes, second buffers."""
    if count <= _ONE_TILE:
        return 1
    passes = -(-bits // 8)
    buffers = 2 * item_bytes * count if passes > 1 else 0
    return buffers + 2048 * passes + 1024 * -(-count // 4608) + 511


def added_by_index(self, values, positions):
    """index_put_ that adds up (index_put_with_sort_kernel): linear indices, and these sorted, with their places."""
    dims = [dim for dim, position in enumerate(positions) if position is not None]
    shape = torch.broadcast_shapes(*(positions[dim].shape for dim in dims))
    rows, count = math.prod(self.shape[dim] for dim in dims), math.prod(shape)
    positions.clear()
    if count == 0:
        return
    long = {"dtype": torch.int64, "device": self.device}
    wrapped = torch.empty((count,), **long)
    linear = torch.empty((count,), **long)
    del wrapped
    plain = values.contiguous()
    kept = [torch.empty((count,), **long) for _ in range(3)]
    room(sort_bytes(count, bits=max(1, rows.bit_length())), self.device)
    del kept, plain, linear


def _sorted_indices(indices):
    ordered, places = torch.empty_like(indices), torch.empty_like(indices)
    numbers = torch.empty_like(indices)
    held = room(sort_bytes(indices.numel(), indices.element_size()), indices.device)
    del numbers, held
    return ordered, places


def _segments(indices, rows, width, dtype):
    """embedding_backward_cuda_kernel: the gradient, and the partial sums of rows that have the same index."""
    out = torch.empty((rows, width), dtype=dtype, device=indices.device)
    count = indices.numel()
    most = min(count, rows)
    partial = count // _ROWS_TOGETHER + most
    long = {"dtype": indices.dtype, "device": indices.device}
    held = [torch.empty((count,), **long), torch.empty((), dtype=torch.int64, device=indices.device)]
    keys, counters = torch.empty((count,), **long), room(1279, indices.device)
    del keys, counters
    held += [torch.empty((most,), **long), torch.empty((most,), **long)]
    held += [torch.empty((), dtype=torch.int64, device=indices.device), torch.empty((partial,), **long)]
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    if count <= _OFTEN * rows:
        held.append(torch.empty((partial, width), dtype=acc, device=indices.device))
    else:
        held.append(torch.empty((partial,), **long))
        held.append(torch.empty((rows, width) if acc != dtype else (0,), dtype=acc, device=indices.device))
    return out


def _sorted_grad(plain, indices, rows, by_frequency):
    ordered, places = _sorted_indices(indices)
    counts = torch.empty_like(indices) if by_frequency else None
    out = _segments(indices, rows, plain.shape[-1], plain.dtype)
    del ordered, places, counts
    return out


def _embedding_grad(grad, indices, rows, padding, scale_by_frequency):
    plain, flat = grad.contiguous(), indices.contiguous()
    if indices.numel() <= _FEW_INDICES and not scale_by_frequency:
        return torch.empty((rows, grad.shape[-1]), dtype=plain.dtype, device=plain.device)
    return _sorted_grad(plain, flat, rows, scale_by_frequency)


def _bag_grad(grad, indices, offset2bag, bag_size, maximum, rows, by_frequency, mode, weights, padding=-1):
    if indices.numel() == 0 or mode == 2:  # the maximum needs no sorting
        return torch.empty((rows, grad.shape[1]), dtype=grad.dtype, device=grad.device)
    return _sorted_grad(grad.contiguous(), indices, rows, by_frequency)


def _bag_grad_of_any_kind(grad, indices, offsets, offset2bag, bag_size, maximum, rows, by_frequency, mode,
                          sparse, weights, padding=-1):  # fmt: skip
    if sparse:
        return torch.ops.aten._embedding_bag_sparse_backward(
            grad, indices, offsets, offset2bag, bag_size, rows, by_frequency, mode, weights, padding
        )
    return _bag_grad(grad, indices, offset2bag, bag_size, maximum, rows, by_frequency, mode, weights, padding)


def _ctc_grad(grad, scores, targets, lengths, target_lengths, *_rest):
    """The gradient, and the probabilities of all ends of each target (LossCTC.cu: log_beta)."""
    out = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
    steps, batch = scores.shape[:2]
    longest = max(target_lengths, default=0)
    ends = torch.empty((batch, steps, 2 * longest + 1), dtype=scores.dtype, device=scores.device)
    del ends
    return out


def _roll(self, shifts, dims=()):
    """One dimension after the other, each into a tensor of its own."""
    for _ in shifts:
        self = torch.empty_like(self.contiguous())
    return self


def _masked_scatter(self, mask, source):
    torch.ops.carma.forget(self)
    sums = torch.empty((self.numel(),), dtype=torch.int64, device=self.device)
    del sums
    return self


KERNELS = {
    "mse_loss": _pair_loss,
    "smooth_l1_loss": _pair_loss,
    "huber_loss": _huber_loss,
    "binary_cross_entropy": _binary_loss,
    "embedding_dense_backward": _embedding_grad,
    "_embedding_bag_backward": _bag_grad_of_any_kind,
    "_embedding_bag_dense_backward": _bag_grad,
    "_ctc_loss_backward": _ctc_grad,
    "roll": _roll,
    "masked_scatter_": _masked_scatter,
}
