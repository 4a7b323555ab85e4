"""Attention: the implementation of scaled_dot_product_attention that a GPU takes, and what each keeps for backward.

The choice follows aten/src/ATen/native/transformers/cuda/sdp_utils.cpp; a wrong one is wrong by an order of magnitude.
"""

import functools

import torch

from . import cuda_api, kernels, report


def install():
    kernels.register({"scaled_dot_product_attention": _attend}, "AutogradCUDA", "CUDA")


def _attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    implementation = choose(query, key, value, attn_mask, enable_gqa)
    aten, mask = torch.ops.aten, attn_mask
    if mask is not None and mask.dtype == torch.bool and implementation != "math":
        mask = torch.empty_like(mask, dtype=query.dtype)  # zeros and minus infinities
    grads = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    given = (query, key, value)
    if implementation == "math":
        attend = aten._scaled_dot_product_attention_math
        return attend(*given, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]
    if implementation == "flash":
        padded, width = [_padded(each) for each in given], query.shape[-1]
        scale = scale if scale is not None else width**-0.5
        out = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :width] if out.shape[-1] != width else out
    if implementation == "cudnn":
        attend = aten._scaled_dot_product_cudnn_attention
        return attend(*given, mask, grads, dropout_p, is_causal, False, scale=scale)[0]
    if mask is not None:
        mask = _whole_mask(mask, query, key)
    return aten._scaled_dot_product_efficient_attention(*given, mask, grads, dropout_p, is_causal, scale=scale)[0]


def _padded(tensor):
    missing = -tensor.shape[-1] % 8
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _whole_mask(mask, query, key):
    """preprocess_mask: rows of a length that 16 divides, seen as one mask for each head."""
    missing = -mask.shape[-1] % 16
    if missing:
        mask = torch.nn.functional.pad(mask, (0, missing))[..., : mask.shape[-1]]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def choose(query, key, value, mask=None, grouped=False):
    """flash, efficient, math or cudnn, in PyTorch's order of preference for the capability."""
    cuda, capability = torch.backends.cuda, cuda_api.CAPABILITY
    half = query.dtype in (torch.float16, torch.bfloat16)
    given = (query, key, value) if mask is None else (query, key, value, mask)
    dense = query.ndim == 4 and all(each.stride(-1) == 1 or each.shape[-1] == 1 for each in given)
    width = max(query.shape[-1], value.shape[-1])
    same_width = query.shape[-1] == key.shape[-1] == value.shape[-1]
    if not dense:
        return "math"
    flash = cuda.flash_sdp_enabled() and half and mask is None and capability >= (8, 0) and width <= 256 and same_width
    efficient = cuda.mem_efficient_sdp_enabled() and not grouped and capability >= (5, 0)
    cudnn = (
        cuda.cudnn_sdp_enabled() and half and capability[0] in (9, 10) and capability[1] == 0
        and not (mask is not None and mask.requires_grad)
        and same_width and width <= 256 and width % 8 == 0
    )  # fmt: skip
    for name, possible in (("cudnn", cudnn), ("flash", flash), ("efficient", efficient)):
        if possible:
            report.flags.add(f"sdpa_{name}")
            return name
    return "math"


def _like(tensor, shape):
    """Sizes of `shape`, the order of the dimensions in memory as in `tensor`."""
    order = sorted(range(4), key=lambda dim: (-tensor.stride(dim), dim))
    made = torch.empty([shape[dim] for dim in order], dtype=tensor.dtype, device=tensor.device)
    return made.permute([order.index(dim) for dim in range(4)])


def _cudnn(query, key, value, bias, keep, dropout=0.0, causal=False, debug=False, *, scale=None):
    batch, heads, length, _ = query.shape
    state = {"dtype": torch.int64, "device": query.device}
    seed, offset = torch.empty((), **state), torch.empty((), **state)
    out = _like(query, (batch, heads, length, value.shape[-1]))
    sums = torch.empty((batch, heads, length, 1) if keep else (0,), dtype=torch.float32, device=query.device)
    kernels.room(256, query.device)
    return out, sums, None, None, length, key.shape[2], seed, offset, torch.empty((0,), device=query.device)


def _cudnn_grad(grad, query, key, value, *_rest, **_words):
    into = tuple(torch.empty_like(each) for each in (query, key, value))
    kernels.room(_partial_grads(query, key, query.shape[2], query.shape[3]) + 256, query.device)
    return into


def _partial_grads(query, key, length, width):
    """The query's gradient in float, a number for each row, and gradients of shared keys and values for each head."""
    batch, heads = query.shape[:2]
    total = 4 * batch * heads * length * (width + 1)
    if key.shape[1] != heads:
        total += 2 * batch * heads * key.shape[2] * key.shape[3] * query.element_size()
    return total


def _flash_grad(grad, query, key, value, *_rest, **_words):
    width = query.shape[3]
    into = tuple(torch.empty_like(each) for each in (query, key, value))
    width = -(-width // 32) * 32 if width <= 192 else 256
    kernels.room(_partial_grads(query, key, -(-query.shape[2] // 128) * 128, width), query.device)
    return into


def _efficient(query, key, value, bias, keep, dropout=0.0, causal=False, *, scale=None):
    batch, heads, length, _ = query.shape
    out = torch.empty((batch, length, heads, value.shape[-1]), dtype=query.dtype, device=query.device)
    rows = -(-length // 32) * 32 if keep else 0
    sums = torch.empty((batch, heads, rows), dtype=torch.float32, device=query.device)
    state = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)  # on the host
    return (out.transpose(1, 2), sums, *state)


def _efficient_grad(grad, query, key, value, bias, out, sums, seed, offset, dropout, mask, causal=False, *,
                    scale=None):  # fmt: skip
    if grad is None:
        return None, None, None, None
    batch, heads, length, _ = query.shape
    plain = grad.transpose(1, 2).contiguous()  # as the kernel reads it
    into = [
        torch.empty((each.shape[0], each.shape[2], each.shape[1], each.shape[3]), dtype=each.dtype, device=each.device)
        for each in (query, key, value)
    ]
    bias_grad = None
    if bias is not None and mask[3]:
        columns = -(-bias.shape[-1] // 16) * 16
        whole = torch.empty((*bias.shape[:-1], columns), dtype=bias.dtype, device=bias.device)
        bias_grad = whole[..., : bias.shape[-1]]
    product = torch.empty(grad.shape, dtype=torch.float32, device=grad.device)
    rows = torch.empty((batch, length, heads), dtype=torch.float32, device=grad.device)
    delta = rows.transpose(1, 2).contiguous()
    del product, rows
    kernels.room(batch * heads * _efficient_workspace(query, key), query.device)
    del delta, plain
    return (*(each.transpose(1, 2) for each in into), bias_grad)


def _efficient_workspace(query, key):
    """AttentionBackwardKernel::workspace_elements (mem_eff_attention/kernel_backward.h), for one head."""
    length, width = query.shape[2], query.shape[3]
    half = query.element_size() == 2
    rows = 64 if width <= 64 else 128
    columns = -(-width // 64)
    queries = -(-length // rows) * columns * (16 + rows * 64 * 4)
    if not half or width <= rows:
        return queries
    keys = -(-key.shape[2] // 64) * 64 * -(-width // rows) * rows * 4
    return queries + 2 * keys


# The fast path that nn.MultiheadAttention and nn.TransformerEncoderLayer take where no gradient is wanted. Order and
# sizes are those of aten/src/ATen/native/transformers (transformer.cpp, cuda/attention.cu).


def _encode_attention(query, key, value, width, heads, weight, bias, out_weight, out_bias, mask=None,
               need_weights=True, average_attn_weights=True, mask_type=None):  # fmt: skip
    batch, length, _ = query.shape  # key and value are the same: others take the slow path
    if (width // heads) % 8 == 0 and not need_weights and mask is None:
        split = query.view(batch, -1, heads, width // heads).transpose(1, 2)
        if choose(split, split, split) != "math":
            return _encode_fused(query, heads, weight, bias, out_weight, out_bias), None
    joined = torch.matmul(query, weight.t())
    parts = torch.empty((3, batch, heads, length, width // heads), dtype=query.dtype, device=query.device)
    del joined
    scores = torch.bmm(parts[0].flatten(0, 1), parts[1].flatten(0, 1).transpose(1, 2))
    shares = torch.empty_like(scores)
    del scores
    context = parts[0]  # is written over
    if not need_weights:
        shares = None
    plain = torch.empty((batch, length, width), dtype=context.dtype, device=context.device)
    out = torch.nn.functional.linear(plain, out_weight, out_bias)
    if shares is not None:
        shares = shares.view(batch, heads, length, -1)
        shares = shares.sum(1) / heads if average_attn_weights else shares
    return out, shares


def _encode_fused(query, heads, weight, bias, out_weight, out_bias):
    batch, _, width = query.shape
    functional = torch.nn.functional
    parts = [
        part.view(batch, -1, heads, width // heads).transpose(1, 2)
        for part in functional.linear(query, weight, bias).chunk(3, -1)
    ]
    mixed = functional.scaled_dot_product_attention(*parts)
    return functional.linear(mixed.transpose(1, 2).reshape(batch, -1, width), out_weight, out_bias)


def _encode_layer(source, width, heads, weight, bias, out_weight, out_bias, gelu, norm_first, eps, norm_weight,
           norm_bias, second_weight, second_bias, wide_weight, wide_bias, narrow_weight, narrow_bias, mask=None,
           mask_type=None):  # fmt: skip
    norm = functools.partial(torch.nn.functional.layer_norm, normalized_shape=(width,), eps=eps)
    first = functools.partial(norm, weight=norm_weight, bias=norm_bias)
    second = functools.partial(norm, weight=second_weight, bias=second_bias)
    x = first(source) if norm_first else source
    x = torch.ops.aten._native_multi_head_attention(
        x, x, x, width, heads, weight, bias, out_weight, out_bias, mask, False, True, mask_type
    )[0]
    x.add_(source)
    x = x if norm_first else first(x)
    before = x
    x = second(x) if norm_first else x
    wide = torch.ops.aten._addmm_activation(wide_bias, x.flatten(0, 1), wide_weight.t(), use_gelu=gelu)
    x = torch.addmm(narrow_bias, wide, narrow_weight.t()).view(source.shape)
    del wide
    x.add_(before)
    return x if norm_first else second(x)


KERNELS = {
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_grad,
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_grad,
    "_scaled_dot_product_flash_attention_backward": _flash_grad,
    "_native_multi_head_attention": _encode_attention,
    "_transformer_encoder_layer_fwd": _encode_layer,
    # Rows of their own lengths are not followed: padded ones take the same path, and no less.
    "_nested_tensor_from_mask_left_aligned": lambda _rows, _mask: False,
}
