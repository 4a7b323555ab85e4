"""Kernels whose temporaries are larger than their results: losses, gradients of embeddings, whatever sorts.

Sizes and order are those of PyTorch's CUDA code: aten/src/ATen/native/Loss.cpp and cuda/Loss.cu (a loss is made for
each element first, in the storage that the result keeps), cuda/Embedding*.cu, cuda/Indexing.cu, cuda/Sort.cpp.
"""

_FEW_INDICES = 3072  # up to so many, an embedding's gradient needs no sorting
_ROWS_TOGETHER = 10  # of a sorted gradient that are summed by one warp
_ONE_TILE = 2048  # so many are sorted without further memory (seen between 1000 and 2401)
_OFTEN = 32  # an index that comes more often: sums go straight into the gradient (seen between 16 and 41)


def kernels(torch):
    return {
        "mse_loss": lambda *args, **words: _pair_loss(torch, *args, **words),
        "smooth_l1_loss": lambda *args, **words: _pair_loss(torch, *args, **words),
        "huber_loss": lambda self, target, reduction=1, delta=1.0: _reduced(torch, torch.empty_like(self), reduction),
        "binary_cross_entropy": lambda *args, **words: _binary_loss(torch, *args, **words),
        "embedding_dense_backward": lambda *args: _embedding_grad(torch, *args),
        "_embedding_bag_backward": lambda *args, **words: _bag_grad_of_any_kind(torch, *args, **words),
        "_embedding_bag_dense_backward": lambda *args, **words: _bag_grad(torch, *args, **words),
        "_ctc_loss_backward": lambda grad, scores, targets, lengths, target_lengths, *rest: _ctc_grad(
            torch, scores, max(target_lengths, default=0)
        ),
        "roll": lambda self, shifts, dims=(): _roll(torch, self, len(shifts)),
        "masked_scatter_": lambda self, mask, source: _masked_scatter(torch, self, mask),
    }


def _pair_loss(torch, self, target, reduction=1, beta=1.0):
    shape = torch.broadcast_shapes(self.shape, target.shape)
    out = torch.empty(shape, dtype=torch.result_type(self, target), device=self.device)
    if reduction == 0:
        return out
    each = torch.empty_like(out)
    out.resize_(())  # keeps what it has
    reduce = torch.mean if reduction == 1 else torch.sum
    return reduce(each, (), out=out)


def _reduced(torch, each, reduction):
    return each if reduction == 0 else each.mean() if reduction == 1 else each.sum()


def _binary_loss(torch, self, target, weight=None, reduction=1):
    each = torch.empty_like(self)
    if reduction == 0:
        return each
    _reduced(torch, each, reduction)
    return each.resize_(())


def sort_bytes(count, item_bytes=8, bits=64):
    """cub::DeviceRadixSort::SortPairs: 8 bits a pass, a histogram for each; with several passes, second buffers."""
    if count <= _ONE_TILE:
        return 1
    passes = -(-bits // 8)
    buffers = 2 * item_bytes * count if passes > 1 else 0
    return buffers + 2048 * passes + 1024 * -(-count // 4608) + 511


def added_by_index(torch, self, values, positions):
    """index_put_ that adds up (index_put_with_sort_kernel): linear indices, and these sorted, with their places."""
    dims = [dim for dim, position in enumerate(positions) if position is not None]
    shape = torch.broadcast_shapes(*(positions[dim].shape for dim in dims))
    rows, count = 1, 1
    for dim in dims:
        rows *= self.shape[dim]
    for size in shape:
        count *= size
    positions.clear()
    if count == 0:
        return
    long = {"dtype": torch.int64, "device": self.device}
    wrapped = torch.empty((count,), **long)
    linear = torch.empty((count,), **long)
    del wrapped
    plain = values.contiguous()
    kept = [torch.empty((count,), **long) for _ in range(3)]
    held = torch.empty((sort_bytes(count, bits=max(1, rows.bit_length())),), dtype=torch.uint8, device=self.device)
    del held, kept, plain, linear


def _sorted_indices(torch, indices):
    ordered, places = torch.empty_like(indices), torch.empty_like(indices)
    numbers = torch.empty_like(indices)
    held = torch.empty(
        (sort_bytes(indices.numel(), indices.element_size()),),
        dtype=torch.uint8,
        device=indices.device,
    )
    del numbers, held
    return ordered, places


def _segments(torch, indices, rows, width, dtype):
    """embedding_backward_cuda_kernel: the gradient, and the partial sums of rows that have the same index."""
    out = torch.empty((rows, width), dtype=dtype, device=indices.device)
    count = indices.numel()
    most = min(count, rows)
    partial = count // _ROWS_TOGETHER + most
    long = {"dtype": indices.dtype, "device": indices.device}
    held = [torch.empty((count,), **long), torch.empty((), dtype=torch.int64, device=indices.device)]
    keys, counters = torch.empty((count,), **long), torch.empty((1279,), dtype=torch.uint8, device=indices.device)
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


def _embedding_grad(torch, grad, indices, rows, padding, scale_by_frequency):
    plain, width, count = grad.contiguous(), grad.shape[-1], indices.numel()
    flat = indices.contiguous()
    if count <= _FEW_INDICES and not scale_by_frequency:
        return torch.empty((rows, width), dtype=plain.dtype, device=plain.device)
    ordered, places = _sorted_indices(torch, flat)
    counts = torch.empty_like(flat) if scale_by_frequency else None
    out = _segments(torch, flat, rows, width, plain.dtype)
    del ordered, places, counts
    return out


def _bag_grad(torch, grad, indices, offset2bag, bag_size, maximum, rows, by_frequency, mode, weights, padding=-1):
    width = grad.shape[1]
    if indices.numel() == 0 or mode == 2:  # the maximum needs no sorting
        return torch.empty((rows, width), dtype=grad.dtype, device=grad.device)
    plain = grad.contiguous()
    ordered, places = _sorted_indices(torch, indices)
    counts = torch.empty_like(indices) if by_frequency else None
    out = _segments(torch, indices, rows, width, plain.dtype)
    del ordered, places, counts
    return out


def _bag_grad_of_any_kind(torch, grad, indices, offsets, offset2bag, bag_size, maximum, rows, by_frequency, mode,
                          sparse, weights, padding=-1):  # fmt: skip
    if sparse:
        return torch.ops.aten._embedding_bag_sparse_backward(
            grad, indices, offsets, offset2bag, bag_size, rows, by_frequency, mode, weights, padding
        )
    return _bag_grad(torch, grad, indices, offset2bag, bag_size, maximum, rows, by_frequency, mode, weights, padding)


def _ctc_grad(torch, scores, longest):
    """The gradient, and the probabilities of all ends of each target (LossCTC.cu: log_beta)."""
    out = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
    steps, batch = scores.shape[:2]
    ends = torch.empty((batch, steps, 2 * longest + 1), dtype=scores.dtype, device=scores.device)
    del ends
    return out


def _roll(torch, self, times):
    """One dimension after the other, each into a tensor of its own."""
    for _ in range(times):
        self = torch.empty_like(self.contiguous())
    return self


def _masked_scatter(torch, self, mask):
    torch.ops.carma.forget(self)
    sums = torch.empty((self.numel(),), dtype=torch.int64, device=self.device)
    del sums
    return self
