"""Shape rules for common operations on the meta device, in place of torch's meta kernels. Stdlib and torch only.

torch's meta kernels are written in Python and slow: a batch norm takes 3 ms, all operations of a model a third of a
second. Only the shapes of results are needed, and the rules for most operations are simple. A test compares them with
torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

ops = torch.ops.aten
SAME_SHAPE = (
    ops.batch_norm, ops.layer_norm, ops.group_norm, ops.instance_norm, ops.rms_norm, ops.dropout, ops.relu, ops.gelu,
    ops.leaky_relu, ops.elu, ops.selu, ops.celu, ops.silu, ops.mish, ops.tanh, ops.sigmoid, ops.softplus, ops.hardswish,
    ops.hardsigmoid, ops.hardtanh, ops.relu6, ops.log_sigmoid, ops.triu, ops._prelu_kernel, ops.prelu,
)  # fmt: skip
IN_PLACE = (
    ops.relu_, ops.leaky_relu_, ops.elu_, ops.selu_, ops.celu_, ops.silu_, ops.mish_, ops.hardswish_, ops.hardsigmoid_,
    ops.hardtanh_, ops.relu6_, ops.uniform_, ops.normal_, ops.fill_, ops.zero_, ops.add_, ops.div_,
)  # fmt: skip
BROADCAST = (ops.add, ops.mul, ops.div, ops.sub, ops.masked_fill)


def empty(shape: Any) -> Any:
    return torch.empty(shape, device="meta")


def same(x: Any, *_: Any, **__: Any) -> Any:
    return empty(x.shape)


def itself(x: Any, *_: Any, **__: Any) -> Any:
    return x


def broadcast(x: Any, y: Any, *_: Any, **__: Any) -> Any:
    return empty(torch.broadcast_shapes(x.shape, y.shape) if isinstance(y, torch.Tensor) else x.shape)


def linear(x: Any, weight: Any, *_: Any) -> Any:
    return empty((*x.shape[:-1], weight.shape[0]))


def addmm(_bias: Any, x: Any, weight: Any, **__: Any) -> Any:
    return empty((x.shape[0], weight.shape[1]))


def attention(query: Any, _key: Any, value: Any, *_: Any, **__: Any) -> Any:
    return empty((*query.shape[:-1], value.shape[-1]))


SHAPE_RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(SAME_SHAPE, same),
    **dict.fromkeys(IN_PLACE, itself),
    **dict.fromkeys(BROADCAST, broadcast),
    ops.linear: linear,
    ops.addmm: addmm,
    ops.scaled_dot_product_attention: attention,
}


def result(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation, by its shape rule if it has one and its first argument is a floating-point tensor;
    otherwise by torch's meta kernel."""
    rule = SHAPE_RULES.get(func.overloadpacket)
    if rule is None or not args or not torch.is_tensor(args[0]) or not args[0].is_floating_point():
        return func(*args, **kwargs)
    return rule(*args, **kwargs)
