"""The fast path that nn.MultiheadAttention and nn.TransformerEncoderLayer take where no gradient is wanted.

Order and sizes are those of aten/src/ATen/native/transformers (transformer.cpp, cuda/attention.cu).
"""

import torch

from . import attention


def _attention(query, key, value, width, heads, weight, bias, out_weight, out_bias, mask=None,
               need_weights=True, average_attn_weights=True, mask_type=None):  # fmt: skip
    batch, length, _ = query.shape  # key and value are the same: others take the slow path
    if (width // heads) % 8 == 0 and not need_weights and mask is None:
        split = query.view(batch, -1, heads, width // heads).transpose(1, 2)
        if attention.choose(split, split, split) != "math":
            return _fused(query, heads, weight, bias, out_weight, out_bias), None
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


def _fused(query, heads, weight, bias, out_weight, out_bias):
    batch, _, width = query.shape
    functional = torch.nn.functional
    parts = [
        part.view(batch, -1, heads, width // heads).transpose(1, 2)
        for part in functional.linear(query, weight, bias).chunk(3, -1)
    ]
    mixed = functional.scaled_dot_product_attention(*parts)
    return functional.linear(mixed.transpose(1, 2).reshape(batch, -1, width), out_weight, out_bias)


def _layer(source, width, heads, weight, bias, out_weight, out_bias, gelu, norm_first, eps, norm_weight,
           norm_bias, second_weight, second_bias, wide_weight, wide_bias, narrow_weight, narrow_bias, mask=None,
           mask_type=None):  # fmt: skip
    def first(x):
        return torch.nn.functional.layer_norm(x, (width,), norm_weight, norm_bias, eps)

    def second(x):
        return torch.nn.functional.layer_norm(x, (width,), second_weight, second_bias, eps)

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
    "_native_multi_head_attention": _attention,
    "_transformer_encoder_layer_fwd": _layer,
    # Rows of their own lengths are not followed: padded ones take the same path, and no less.
    "_nested_tensor_from_mask_left_aligned": lambda _rows, _mask: False,
}
