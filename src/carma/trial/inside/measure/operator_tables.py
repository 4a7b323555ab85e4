"""The operators to measure, by the kind of their size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .operators import Built, Inputs, inplace, of_module, unary


def matmul(make: Inputs) -> Built:
    cols = make.shape[1]
    a, b = make.grad(), make.grad(cols, 384)
    return (lambda: torch.mm(a, b)), [a, b]


def addmm(make: Inputs) -> Built:
    cols = make.shape[1]
    a, b, bias = make.grad(), make.grad(cols, 384), make.grad(384)
    return (lambda: torch.addmm(bias, a, b)), [a, b, bias]


def bmm(make: Inputs) -> Built:
    batch, length, width = make.shape
    a, b = make.grad(), make.grad(batch, width, length)
    return (lambda: torch.bmm(a, b)), [a, b]


def baddbmm(make: Inputs) -> Built:
    batch, length, width = make.shape
    c, a, b = make.grad(batch, length, length), make.grad(), make.grad(batch, width, length)
    return (lambda: torch.baddbmm(c, a, b)), [c, a, b]


def einsum(make: Inputs) -> Built:
    a, b = make.grad(), make.grad()
    return (lambda: torch.einsum("bid,bjd->bij", a, b)), [a, b]


def broadcast_matmul(make: Inputs) -> Built:
    a, b = make.grad(), make.grad(make.shape[-1], 300)
    return (lambda: torch.matmul(a, b)), [a, b]


def cdist(make: Inputs) -> Built:
    a, b = make.grad(), make.grad()
    return (lambda: torch.cdist(a.float(), b.float())), [a, b]


def embedding(vocabulary: int, padding: bool = False) -> Callable[[Inputs], Built]:
    def build(make: Inputs) -> Built:
        weight = make.grad(vocabulary, make.shape[-1])
        index = make.index(vocabulary, *make.shape[:-1])
        return (lambda: F.embedding(index, weight, padding_idx=0 if padding else None)), [weight]

    return build


def embedding_bag(mode: str, vocabulary: int) -> Callable[[Inputs], Built]:
    def build(make: Inputs) -> Built:
        weight = make.grad(vocabulary, 64)
        index = make.index(vocabulary, *make.shape)
        return (lambda: F.embedding_bag(index, weight, mode=mode)), [weight]

    return build


def class_loss(call: Callable[..., Any]) -> Callable[[Inputs], Built]:
    def build(make: Inputs) -> Built:
        x, target = make.grad(), make.index(make.shape[1], make.shape[0])
        return (lambda: call(x, target)), [x]

    return build


def pixel_loss(make: Inputs) -> Built:
    n, c, h, w = make.shape
    x, target = make.grad(), make.index(c, n, h, w)
    return (lambda: F.cross_entropy(x, target)), [x]


def pair_loss(call: Callable[..., Any]) -> Callable[[Inputs], Built]:
    def build(make: Inputs) -> Built:
        x, target = make.grad(), make.data()
        return (lambda: call(x, target)), [x]

    return build


def ctc(make: Inputs) -> Built:
    n, length, classes = make.shape
    x = make.data(length, n, classes).float().log_softmax(-1).requires_grad_()
    target = make.index(classes - 1, n, 20) + 1
    lengths, targets = torch.full((n,), length), torch.full((n,), 20)
    return (lambda: F.ctc_loss(x, target, lengths, targets)), [x]


def indexed(call: Callable[..., Any]) -> Callable[[Inputs], Built]:
    """Whole rows by index: (tensor, index, source rows)."""

    def build(make: Inputs) -> Built:
        x, source = make.grad(), make.grad(1000, make.shape[1])
        index = make.index(make.shape[0], 1000)
        return (lambda: call(x, index, source)), [x, source]

    return build


def per_element(call: Callable[..., Any]) -> Callable[[Inputs], Built]:
    """Single elements by index: (tensor, index of its shape, source)."""

    def build(make: Inputs) -> Built:
        x, source = make.grad(), make.grad()
        index = make.index(make.shape[0], *make.shape)
        return (lambda: call(x, index, source)), [x, source]

    return build


def masked(call: Callable[..., Any]) -> Callable[[Inputs], Built]:
    def build(make: Inputs) -> Built:
        x, mask = make.grad(), make.mask()
        return (lambda: call(x, mask)), [x]

    return build


def several(call: Callable[[list[Any]], Any]) -> Callable[[Inputs], Built]:
    def build(make: Inputs) -> Built:
        parts = [make.grad() for _ in range(4)]
        return (lambda: call(parts)), parts

    return build


def grid_sample(make: Inputs) -> Built:
    n, _, h, w = make.shape
    x, grid = make.grad(), make.data(n, h, w, 2).contiguous().requires_grad_()
    return (lambda: F.grid_sample(x, grid, align_corners=False)), [x, grid]


def linalg(call: Callable[[Any], Any]) -> Callable[[Inputs], Built]:
    """Square positive definite matrices: a batch of them, 64 wide."""

    def build(make: Inputs) -> Built:
        a = torch.rand(make.shape[0], 64, 64, device=make.device)
        x = (a @ a.mT + 64 * torch.eye(64, device=make.device)).requires_grad_()
        return (lambda: call(x)), [x]

    return build


def norm_of(call: Callable[..., Any]) -> Callable[[Inputs], Built]:
    """A normalisation over the last dimension, with weights."""

    def build(make: Inputs) -> Built:
        width = make.shape[-1]
        x, weight, bias = make.grad(), make.grad(width), make.grad(width)
        return (lambda: call(x, [width], weight, bias)), [x, weight, bias]

    return build


def multihead(need_weights: bool) -> Callable[[Inputs], Built]:
    def build(make: Inputs) -> Built:
        module = make.module(nn.MultiheadAttention(make.shape[-1], 8, dropout=0.1, batch_first=True))
        x = make.grad()
        return (lambda: module(x, x, x, need_weights=need_weights)), [x, *module.parameters()]

    return build


def encoder_layer(width: int) -> Any:
    return nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)


def whole(call: Callable[[Inputs], Any]) -> Callable[[Inputs], Built]:
    """A call that makes its own data; only forward."""

    def build(make: Inputs) -> Built:
        return (lambda: call(make)), []

    return build


def counted(call: Callable[[Any], Any]) -> Callable[[Inputs], Built]:
    """A call on integers below 1000."""

    def build(make: Inputs) -> Built:
        x = make.index(1000, make.shape[0])
        return (lambda: call(x)), []

    return build


ROW_OPERATORS = {
    "mm": matmul,
    "addmm": addmm,
    "linear": of_module(lambda s: nn.Linear(s[-1], 1000)),
    "linear_no_bias": of_module(lambda s: nn.Linear(s[-1], 1000, bias=False)),
    "layer_norm": norm_of(F.layer_norm),
    "rms_norm": unary(lambda x: F.rms_norm(x, [x.shape[-1]])),
    "batch_norm_1d": of_module(lambda s: nn.BatchNorm1d(s[-1])),
    "embedding_100": embedding(100),
    "embedding_bag_sum": embedding_bag("sum", 5000),
    "embedding_bag_mean": embedding_bag("mean", 5000),
    "cross_entropy": class_loss(F.cross_entropy),
    "cross_entropy_smooth": class_loss(lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1)),
    "nll_loss": class_loss(F.nll_loss),
    "mse_loss": pair_loss(F.mse_loss),
    "l1_loss": pair_loss(F.l1_loss),
    "smooth_l1_loss": pair_loss(F.smooth_l1_loss),
    "bce_with_logits": pair_loss(F.binary_cross_entropy_with_logits),
    "kl_div": pair_loss(lambda x, y: F.kl_div(x, y, reduction="batchmean")),
    "softmax": unary(lambda x: x.softmax(-1)),
    "log_softmax": unary(lambda x: x.log_softmax(-1)),
    "softmax_fp32": unary(lambda x: F.softmax(x, -1, dtype=torch.float32)),
    "dropout": unary(lambda x: F.dropout(x, 0.1)),
    "gelu": unary(F.gelu),
    "gelu_tanh": unary(lambda x: F.gelu(x, approximate="tanh")),
    "silu": unary(F.silu),
    "relu": unary(F.relu),
    "relu_inplace": inplace(F.relu_),
    "silu_inplace": inplace(lambda x: F.silu(x, inplace=True)),
    "sort": unary(lambda x: x.sort(-1)),
    "sort_first": unary(lambda x: x.sort(0)),
    "argsort": unary(lambda x: x.argsort(-1), False),
    "topk": unary(lambda x: x.topk(8, -1)),
    "cumsum": unary(lambda x: x.cumsum(-1)),
    "cumsum_first": unary(lambda x: x.cumsum(0)),
    "cumprod": unary(lambda x: x.cumprod(-1)),
    "unique": unary(lambda x: x.unique(), False),
    "nonzero": unary(lambda x: (x > 0.5).nonzero(), False),
    "masked_select": masked(torch.masked_select),
    "boolean_index": masked(lambda x, m: x[m]),
    "masked_fill": masked(lambda x, m: x.masked_fill(m, -1.0)),
    "where": masked(lambda x, m: torch.where(m, x, 0.0)),
    "index_select": indexed(lambda x, i, _: x.index_select(0, i)),
    "index": indexed(lambda x, i, _: x[i]),
    "index_add": indexed(lambda x, i, s: x.index_add(0, i, s)),
    "index_copy": indexed(lambda x, i, s: x.index_copy(0, i, s)),
    "index_put": indexed(lambda x, i, s: x.index_put((i,), s)),
    "index_put_accumulate": indexed(lambda x, i, s: x.index_put((i,), s, accumulate=True)),
    "gather": per_element(lambda x, i, _: x.gather(0, i)),
    "scatter": per_element(lambda x, i, s: x.scatter(0, i, s)),
    "scatter_add": per_element(lambda x, i, s: x.scatter_add(0, i, s)),
    "cat": several(lambda parts: torch.cat(parts, 1)),
    "stack": several(lambda parts: torch.stack(parts)),
    "pad": unary(lambda x: F.pad(x, (1, 2))),
    "roll": unary(lambda x: x.roll(3, 0)),
    "flip": unary(lambda x: x.flip(0)),
    "sum": unary(lambda x: x.sum()),
    "sum_first": unary(lambda x: x.sum(0)),
    "sum_last": unary(lambda x: x.sum(-1)),
    "mean": unary(lambda x: x.mean()),
    "std_last": unary(lambda x: x.std(-1)),
    "var": unary(lambda x: x.var()),
    "norm": unary(lambda x: x.norm()),
    "norm_last": unary(lambda x: x.norm(dim=-1)),
    "normalize": unary(lambda x: F.normalize(x, dim=-1)),
    "max": unary(lambda x: x.max()),
    "max_last": unary(lambda x: x.max(-1)),
    "argmax": unary(lambda x: x.argmax(-1), False),
    "logsumexp": unary(lambda x: x.logsumexp(-1)),
    "exp": unary(torch.exp),
    "pow": unary(lambda x: x.pow(3)),
    "clamp": unary(lambda x: x.clamp(0.1, 0.9)),
    "to_fp32": unary(lambda x: x.float()),
    "transpose_copy": unary(lambda x: x.t().contiguous()),
    "multinomial": unary(lambda x: x[:1000].multinomial(4, replacement=True), False),
    "bernoulli": unary(lambda x: x.bernoulli(), False),
    "randn": whole(lambda make: torch.randn(*make.shape, device=make.device)),
    "randperm": whole(lambda make: torch.randperm(make.shape[0] * 4, device=make.device)),
    "one_hot": counted(lambda x: F.one_hot(x, 1000) if x.numel() < 100_000 else None),
    "bincount": counted(lambda x: x.bincount(minlength=1000)),
    "sort_integers": counted(lambda x: x.sort()),
    "unique_integers": counted(lambda x: x.unique(return_inverse=True)),
    "cumsum_integers": counted(lambda x: x.cumsum(0)),
    "arange": whole(lambda make: torch.arange(make.shape[0], device=make.device)),
    "isfinite_all": unary(lambda x: x.isfinite().all(), False),
    "bool_any": unary(lambda x: (x > 2).any(), False),
}
SEQUENCE_OPERATORS = {
    "bmm": bmm,
    "baddbmm": baddbmm,
    "einsum": einsum,
    "matmul_3d_2d": broadcast_matmul,
    "cdist": cdist,
    "linear_3d": of_module(lambda s: nn.Linear(s[-1], 4 * s[-1])),
    "linear_3d_no_bias": of_module(lambda s: nn.Linear(s[-1], 4 * s[-1], bias=False)),
    "linear_gelu": of_module(lambda s: nn.Sequential(nn.Linear(s[-1], 4 * s[-1]), nn.GELU())),
    "layer_norm_3d": norm_of(F.layer_norm),
    "embedding_30522": embedding(30522),
    "embedding_50257_padded": embedding(50257, True),
    "embedding_512": embedding(512),
    "ctc_loss": ctc,
    "rfft": unary(lambda x: torch.fft.rfft(x.float())),
    "fft": unary(lambda x: torch.fft.fft(x.float())),
    "fft2": unary(lambda x: torch.fft.fft2(x.float())),
    "stft": unary(
        lambda x: torch.stft(x.float().flatten(1), 64, return_complex=True, window=torch.ones(64, device=x.device))
    ),
    "multihead_weights": multihead(True),
    "multihead": multihead(False),
    "encoder_layer": of_module(lambda s: encoder_layer(s[-1])),
    "cholesky": linalg(torch.linalg.cholesky),
    "inverse": linalg(torch.linalg.inv),
    "solve": linalg(lambda x: torch.linalg.solve(x, x)),
    "svd": linalg(lambda x: torch.linalg.svd(x)[1]),
    "eigh": linalg(lambda x: torch.linalg.eigh(x)[0]),
    "det": linalg(torch.linalg.det),
    "qr": linalg(lambda x: torch.linalg.qr(x)[0]),
    "tril": unary(torch.tril),
    "repeat_interleave": unary(lambda x: x.repeat_interleave(2, 1)),
    "expand_copy": unary(lambda x: x[:, :1].expand_as(x).contiguous()),
    "glu": unary(F.glu),
    "softmax_3d": unary(lambda x: x.softmax(1)),
}
IMAGE_OPERATORS = {
    "batch_norm": of_module(lambda s: nn.BatchNorm2d(s[1])),
    "batch_norm_eval": of_module(lambda s: nn.BatchNorm2d(s[1]).eval()),
    "group_norm": of_module(lambda s: nn.GroupNorm(1 if s[1] % 8 else 8, s[1])),
    "instance_norm": of_module(lambda s: nn.InstanceNorm2d(s[1])),
    "instance_norm_affine": of_module(lambda s: nn.InstanceNorm2d(s[1], affine=True)),
    "local_response_norm": unary(lambda x: F.local_response_norm(x, 5)),
    "prelu": of_module(lambda s: nn.PReLU(s[1])),
    "max_pool": unary(lambda x: F.max_pool2d(x, 2)),
    "max_pool_overlapping": unary(lambda x: F.max_pool2d(x, 3, 2, 1)),
    "max_pool_3d": unary(lambda x: F.max_pool3d(x.unsqueeze(2), (1, 2, 2))),
    "avg_pool": unary(lambda x: F.avg_pool2d(x, 2)),
    "adaptive_avg_pool_1": unary(lambda x: F.adaptive_avg_pool2d(x, 1)),
    "adaptive_avg_pool_7": unary(lambda x: F.adaptive_avg_pool2d(x, 7)),
    "adaptive_max_pool": unary(lambda x: F.adaptive_max_pool2d(x, 7)),
    "nearest_up": unary(lambda x: F.interpolate(x, scale_factor=2)),
    "nearest_down": unary(lambda x: F.interpolate(x, scale_factor=0.5)),
    "bilinear_up": unary(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
    "bilinear_down": unary(lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear")),
    "bicubic_up": unary(lambda x: F.interpolate(x, scale_factor=2, mode="bicubic")),
    "pixel_shuffle": unary(lambda x: F.pixel_shuffle(x[:, : x.shape[1] // 4 * 4], 2) if x.shape[1] >= 4 else x),
    "unfold": unary(lambda x: F.unfold(x[:4], 3, padding=1)),
    "reflect_pad": unary(lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect")),
    "zero_pad": unary(lambda x: F.pad(x, (1, 1, 1, 1))),
    "dropout_2d": unary(lambda x: F.dropout2d(x, 0.1)),
    "grid_sample": grid_sample,
    "pixel_cross_entropy": pixel_loss,
    "mean_spatial": unary(lambda x: x.mean((2, 3))),
    "sum_channels": unary(lambda x: x.sum(1)),
    "sum_bias": unary(lambda x: x.sum((0, 2, 3))),
    "add_": inplace(lambda x: x.add_(1.0)),
    "relu6_inplace": inplace(lambda x: F.relu6(x, inplace=True)),
    "hardswish_inplace": inplace(lambda x: F.hardswish(x, inplace=True)),
    "leaky_relu": unary(F.leaky_relu),
    "scale_channels": unary(lambda x: x * x[:, :, :1, :1]),
}
TABLES: dict[str, dict[str, Callable[[Inputs], Built]]] = {
    "rows": ROW_OPERATORS,
    "sequences": SEQUENCE_OPERATORS,
    "images": IMAGE_OPERATORS,
}
# The precision of the case does not reach these.
INTEGER_ONLY = {"one_hot", "bincount", "sort_integers", "unique_integers", "cumsum_integers", "arange", "randperm"}
INTEGER_ONLY |= {"randn", "cholesky", "inverse", "solve", "svd", "eigh", "det", "qr"}
