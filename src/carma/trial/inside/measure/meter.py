"""Reads how many bytes a call takes from torch's allocator: exact requests, not rounded blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

Row = dict[str, Any]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}


class ShortOfMemory(RuntimeError):
    """The card was full during a call: libraries then choose other algorithms, so the row would mislead."""


class Reading(NamedTuple):
    """One call: what it returned, and bytes relative to the moment before it."""

    result: Any
    out_bytes: int
    peak_bytes: int
    kept_bytes: int

    def row(self, direction: str) -> Row:
        """The measured part of a row."""
        return {
            "direction": direction,
            "out_bytes": self.out_bytes,
            "peak_bytes": self.peak_bytes,
            "kept_bytes": self.kept_bytes,
        }


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


class Meter:
    """The allocator of one GPU."""

    device = "cuda"
    # Above this the cache is handed back after a call, so that the workers beside this one find room.
    CACHE_BYTES = 3 << 30

    def read(self, call: Callable[[], Any]) -> Reading:
        """Run ``call`` once and read its bytes."""
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats_as_nested_dict()
        result = call()
        after = torch.cuda.memory_stats_as_nested_dict()
        if after["num_ooms"] > before["num_ooms"]:
            raise ShortOfMemory("the card was full")
        base = before["requested_bytes"]["all"]["current"]
        asked = after["requested_bytes"]["all"]
        return Reading(result, storage_bytes(result), int(asked["peak"] - base), int(asked["current"] - base))

    def settle(self) -> None:
        """Wait for the GPU, and hand back a large cache."""
        torch.cuda.synchronize()
        if torch.cuda.memory_reserved() > self.CACHE_BYTES:
            torch.cuda.empty_cache()


class DryMeter(Meter):
    """The same on a machine without a GPU: the plumbing runs, the bytes are only those of the results."""

    device = "cpu"

    def read(self, call: Callable[[], Any]) -> Reading:
        result = call()
        size = storage_bytes(result)
        return Reading(result, size, size, size)

    def settle(self) -> None:
        """Nothing to wait for."""


def forward_backward(meter: Meter, call: Callable[[], Any], inputs: Sequence[Any]) -> list[Row]:
    """Rows of a call and of its gradients for ``inputs`` (none: the call alone).

    Only the first output has a gradient: that is what training does with the states of a recurrent network, the
    indices of a maximum, or the weights of an attention.
    """
    forward = meter.read(call)
    rows = [forward.row("forward")]
    outputs = [out for out in tensors_in(forward.result) if out.requires_grad][:1]
    if not inputs or not outputs:
        return rows
    rows[0]["grad_fn"] = outputs[0].grad_fn.name() if outputs[0].grad_fn is not None else None
    grads = [torch.ones_like(out) for out in outputs]
    backward = meter.read(lambda: torch.autograd.grad(outputs, list(inputs), grads, allow_unused=True))
    rows.append(backward.row("backward"))
    return rows


def warm_up(meter: Meter) -> None:
    """Pay what libraries take once per process, in this thread and in autograd's, so that no row pays it."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        a = torch.ones(64, 64, device=meter.device, dtype=dtype, requires_grad=True)
        bias = torch.ones(64, device=meter.device, dtype=dtype, requires_grad=True)
        torch.nn.functional.linear(a @ a, a, bias).sum().backward()
    lstm = torch.nn.LSTM(8, 8, 2, dropout=0.1).to(meter.device)
    lstm(torch.ones(4, 2, 8, device=meter.device))[0].sum().backward()
    meter.settle()
