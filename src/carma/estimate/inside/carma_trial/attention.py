"""F.scaled_dot_product_attention: which of PyTorch's four ways a GPU takes, and what each keeps for the backward pass.

The choice follows aten/src/ATen/native/transformers/cuda/sdp_utils.cpp; a wrong one is an error of an order of magnitude.
"""

from . import report


def install(torch, library, gpu):
    capability = tuple(gpu.get("capability", (9, 0)))

    def attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
        return _attend(torch, capability, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    for where in ("AutogradCUDA", "CUDA"):
        library.impl("scaled_dot_product_attention", attend, where)


def _attend(torch, capability, query, key, value, mask, dropout, causal, scale, gqa):
    way = choose(torch, capability, query, key, value, mask, dropout, causal, gqa)
    aten = torch.ops.aten
    if mask is not None and mask.dtype == torch.bool and way != "math":
        mask = torch.where(mask, 0.0, float("-inf")).to(query.dtype)
    grads = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if way == "math":
        return aten._scaled_dot_product_attention_math(
            query, key, value, mask, dropout, causal, None, scale=scale, enable_gqa=gqa
        )[0]
    if way == "flash":
        padded, width = [_padded(torch, each) for each in (query, key, value)], query.shape[-1]
        scale = scale if scale is not None else width**-0.5
        out = aten._scaled_dot_product_flash_attention(*padded, dropout, causal, False, scale=scale)[0]
        return out[..., :width] if out.shape[-1] != width else out
    if way == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, grads, dropout, causal, False, scale=scale
        )[0]
    if mask is not None:
        mask = _whole_mask(torch, mask, query, key)
    return aten._scaled_dot_product_efficient_attention(query, key, value, mask, grads, dropout, causal, scale=scale)[0]


def _padded(torch, tensor):
    missing = -tensor.shape[-1] % 8
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _whole_mask(torch, mask, query, key):
    """preprocess_mask: rows of a length that 16 divides, seen as one mask for each head."""
    missing = -mask.shape[-1] % 16
    if missing:
        mask = torch.nn.functional.pad(mask, (0, missing))[..., : mask.shape[-1]]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def choose(torch, capability, query, key, value, mask, dropout, causal, gqa):
    """flash, efficient, math or cudnn, in PyTorch's order of preference for the capability."""
    cuda = torch.backends.cuda
    half = query.dtype in (torch.float16, torch.bfloat16)
    dense = query.ndim == 4 and all(each.stride(-1) == 1 for each in (query, key, value))
    width = max(query.shape[-1], value.shape[-1])
    same_width = query.shape[-1] == key.shape[-1] == value.shape[-1]
    if not dense:
        return "math"
    flash = cuda.flash_sdp_enabled() and half and mask is None and capability >= (8, 0) and width <= 256 and same_width
    efficient = cuda.mem_efficient_sdp_enabled() and not gqa and capability >= (5, 0)
    cudnn = (
        cuda.cudnn_sdp_enabled() and half and capability[0] in (9, 10) and capability[1] == 0
        and not (mask is not None and mask.requires_grad)
        and same_width and width <= (256 if not query.requires_grad else 128) and width % 8 == 0
    )  # fmt: skip
    for way, possible in (("cudnn", cudnn), ("flash", flash), ("efficient", efficient)):
        if possible:
            report.flags.add(f"sdpa_{way}")
            return way
    return "math"
