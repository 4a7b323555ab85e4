"""Measures one convolution in its three directions, each on its own."""

from __future__ import annotations

from typing import Any

import torch

from .meter import DTYPES, Meter, Row


def backend_of(x: Any, weight: Any, params: Row) -> str:
    """The implementation that torch picks; it decides whether cuDNN is asked at all."""
    zeros = [0] * len(params["size"])
    try:
        chosen = torch._C._select_conv_backend(
            x,
            weight,
            None,
            params["stride"],
            params["padding"],
            params["dilation"],
            params["transposed"],
            zeros,
            params["groups"],
        )
    except (TypeError, RuntimeError, AttributeError):
        return "unknown"
    return str(chosen).rsplit(".", 1)[-1]


def set_mode(params: Row) -> None:
    """Set torch's switches as the case asks; all of them, because the case before set others."""
    torch.backends.cudnn.allow_tf32 = params["tf32"]
    torch.backends.cudnn.benchmark = params["mode"] == "benchmark"
    torch.backends.cudnn.deterministic = params["mode"] == "deterministic"


def measure(params: Row, meter: Meter) -> list[Row]:
    """One row a direction."""
    set_mode(params)
    rank = len(params["size"])
    layout = torch.contiguous_format
    if params["channels_last"]:
        layout = torch.channels_last if rank == 2 else torch.channels_last_3d
    where = {"device": meter.device, "dtype": DTYPES[params["dtype"]], "memory_format": layout}
    cin, cout, groups = params["cin"], params["cout"], params["groups"]
    shape = [cin, cout // groups] if params["transposed"] else [cout, cin // groups]
    x = torch.empty([params["n"], cin, *params["size"]], **where)
    weight = torch.empty([*shape, *params["kernel"]], **where)
    zeros = [0] * rank
    rest = (params["stride"], params["padding"], params["dilation"], params["transposed"], zeros, groups)
    forward = meter.read(lambda: torch.ops.aten.convolution(x, weight, None, *rest))
    grad = forward.result
    rows = [forward.row("forward")]
    for direction, mask in (("dgrad", [True, False, False]), ("wgrad", [False, True, False])):
        reading = meter.read(
            lambda mask=mask: torch.ops.aten.convolution_backward(grad, x, weight, None, *rest, mask)  # type: ignore[misc]
        )
        rows.append(reading.row(direction))
    extra = {"backend": backend_of(x, weight, params)}
    return [{**row, **extra} for row in rows]
