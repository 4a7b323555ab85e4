"""Bytes that a call requests from torch's allocator (exact, not rounded to blocks), and those of a convolution."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

Row = dict[str, Any]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class ShortOfMemory(RuntimeError):
    """The GPU was full during a call. Libraries then choose other algorithms, so the figure is not usable."""


def tensors_in(value: Any) -> Iterator[Any]:
    """Every tensor in a result, through tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def storage_bytes(value: Any) -> int:
    """Bytes of the storages behind a result, each storage counted once."""
    sizes = {}
    for tensor in tensors_in(value):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return int(sum(sizes.values()))


def _row(direction: str, out: int, peak: int, kept: int) -> Row:
    return {"direction": direction, "out_bytes": out, "peak_bytes": int(peak), "kept_bytes": int(kept)}


class AllocatorMeter:
    """Reads the allocator of one GPU."""

    device = "cuda"
    # A larger cache is released after a call, so that the other workers on this GPU have memory.
    CACHE_BYTES = 3 << 30

    def read(self, direction: str, call: Callable[[], Any]) -> tuple[Any, Row]:
        """The result of ``call``, and its row: bytes relative to the moment before the call."""
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats_as_nested_dict()
        result = call()
        after = torch.cuda.memory_stats_as_nested_dict()
        if after["num_ooms"] > before["num_ooms"]:
            raise ShortOfMemory("the GPU was full")
        base = before["requested_bytes"]["all"]["current"]
        asked = after["requested_bytes"]["all"]
        return result, _row(direction, storage_bytes(result), asked["peak"] - base, asked["current"] - base)

    def settle(self) -> None:
        """Wait for the GPU, and release a large cache."""
        torch.cuda.synchronize()
        if torch.cuda.memory_reserved() > self.CACHE_BYTES:
            torch.cuda.empty_cache()


class DryMeter(AllocatorMeter):
    """Meter for a machine without a GPU: bytes are only those of the results."""

    device = "cpu"

    def read(self, direction: str, call: Callable[[], Any]) -> tuple[Any, Row]:
        result = call()
        size = storage_bytes(result)
        return result, _row(direction, size, size, size)

    def settle(self) -> None:
        """Nothing runs asynchronously."""


def forward_backward(meter: AllocatorMeter, call: Callable[[], Any], inputs: Sequence[Any]) -> list[Row]:
    """Rows of a call and of its gradients for ``inputs`` (none: the call alone).

    Only the first output has a gradient: that is what training does with the states of a recurrent network, the
    indices of a maximum, or the weights of an attention.
    """
    result, row = meter.read("forward", call)
    rows = [row]
    outputs = [out for out in tensors_in(result) if out.requires_grad][:1]
    if not inputs or not outputs:
        return rows
    rows[0]["grad_fn"] = outputs[0].grad_fn.name() if outputs[0].grad_fn is not None else None
    grads = [torch.ones_like(out) for out in outputs]
    backward = meter.read("backward", lambda: torch.autograd.grad(outputs, list(inputs), grads, allow_unused=True))
    return [*rows, backward[1]]


def warm_up(meter: AllocatorMeter) -> None:
    """Call each library once, in this thread and in autograd's, so that no row includes what a first call allocates."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        a = torch.ones(64, 64, device=meter.device, dtype=dtype, requires_grad=True)
        bias = torch.ones(64, device=meter.device, dtype=dtype, requires_grad=True)
        torch.nn.functional.linear(a @ a, a, bias).sum().backward()
    lstm = torch.nn.LSTM(8, 8, 2, dropout=0.1).to(meter.device)
    lstm(torch.ones(4, 2, 8, device=meter.device))[0].sum().backward()
    meter.settle()


def backend_of(*arguments: Any) -> str:
    """The implementation that torch selects for a convolution, which tells whether cuDNN is called."""
    try:
        chosen = torch._C._select_conv_backend(*arguments)
    except (TypeError, RuntimeError, AttributeError):
        return "unknown"
    return str(chosen).rsplit(".", 1)[-1]


def set_mode(params: Row) -> None:
    """Set torch's switches for the case; all of them, because the previous case may have set others."""
    torch.backends.cudnn.allow_tf32 = params["tf32"]
    torch.backends.cudnn.benchmark = params["mode"] == "benchmark"
    torch.backends.cudnn.deterministic = params["mode"] == "deterministic"


def convolution(params: Row, meter: AllocatorMeter) -> list[Row]:
    """One row for each direction: forward, gradient of the input, gradient of the weight."""
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
    grad, row = meter.read("forward", lambda: torch.ops.aten.convolution(x, weight, None, *rest))
    rows = [row]
    for direction, mask in (("dgrad", [True, False, False]), ("wgrad", [False, True, False])):
        call = functools.partial(torch.ops.aten.convolution_backward, grad, x, weight, None, *rest, mask)
        rows.append(meter.read(direction, call)[1])
    return [{**row, "backend": backend_of(x, weight, None, *rest)} for row in rows]
