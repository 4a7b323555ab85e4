"""What a process allocates beside its tensors: the CUDA context, and what the first call of each library adds.

Each function here runs in a new process that has not started CUDA.
"""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .gpu_counters import GpuCounters
from .meter import AllocatorMeter, Row, forward_backward


def ones(meter: AllocatorMeter, *shape: int, dtype: Any = torch.float32) -> Any:
    """A tensor that requires a gradient."""
    return torch.ones(*shape, device=meter.device, dtype=dtype, requires_grad=True)


def conv_step(meter: AllocatorMeter, dtype: Any) -> None:
    """A convolution, forward and backward."""
    x, weight = ones(meter, 8, 16, 32, 32, dtype=dtype), ones(meter, 32, 16, 3, 3, dtype=dtype)
    F.conv2d(x, weight, padding=1).sum().backward()


def attention_step(meter: AllocatorMeter) -> None:
    """Fused attention, forward and backward."""
    x = ones(meter, 2, 4, 128, 64, dtype=torch.bfloat16)
    F.scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()


def adam_step(meter: AllocatorMeter, way: str) -> None:
    """One optimizer step over four tensors."""
    tensors = [torch.nn.Parameter(ones(meter, 64, 64).detach()) for _ in range(4)]
    for tensor in tensors:
        tensor.grad = torch.ones_like(tensor)
    torch.optim.Adam(tensors, **{way: True}).step()


def rnn_step(meter: AllocatorMeter) -> None:
    """A recurrent network, forward and backward."""
    lstm = torch.nn.LSTM(32, 32, 2, dropout=0.1).to(meter.device)
    lstm(ones(meter, 8, 4, 32))[0].sum().backward()


def matmul_step(meter: AllocatorMeter, dtype: Any, backward: bool = False) -> None:
    """A matrix product. Its backward pass runs in autograd's thread, which has its own cuBLAS handle."""
    x = ones(meter, 512, 512, dtype=dtype)
    out = x @ x
    if backward:
        out.sum().backward()


STEPS: dict[str, Callable[[AllocatorMeter], Any]] = {
    "tiny": lambda meter: ones(meter, 4),
    "matmul_fp32": lambda meter: matmul_step(meter, torch.float32),
    "matmul_bf16": lambda meter: matmul_step(meter, torch.bfloat16),
    "backward": lambda meter: matmul_step(meter, torch.float32, True),
    "conv_fp32": lambda meter: conv_step(meter, torch.float32),
    "conv_bf16": lambda meter: conv_step(meter, torch.bfloat16),
    "attention": attention_step,
    "sort": lambda meter: ones(meter, 1000, 1000).detach().sort(),
    "adam_foreach": lambda meter: adam_step(meter, "foreach"),
    "adam_fused": lambda meter: adam_step(meter, "fused"),
    "rnn": rnn_step,
    "fft": lambda meter: torch.fft.rfft(ones(meter, 64, 1000)),
    "linalg": lambda meter: torch.linalg.cholesky(torch.eye(64, device=meter.device)),
    "embedding": lambda meter: F.embedding(torch.zeros(8, dtype=torch.long, device=meter.device), ones(meter, 9, 8)),
}


def outside_memory(gpu: GpuCounters, before: int | None) -> Row:
    """Memory of this process now, in bytes; ``outside_bytes`` is what the allocator does not manage. ``before``: used
    memory of the GPU before this process had a context."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    reserved, used = torch.cuda.memory_reserved(), gpu.used_bytes()
    process, found = gpu.own_bytes()
    grown = used - before if used is not None and before is not None else None
    best = process if process is not None else grown if grown is not None else total - free
    return {
        "reserved_bytes": reserved,
        "requested_bytes": torch.cuda.memory_stats().get("requested_bytes.all.current", 0),
        "process_bytes": process,
        "card_grown_bytes": grown,
        "card_used_bytes": total - free,
        "source": found or ("card" if grown is not None else "mem_get_info"),
        "outside_bytes": best - reserved,
    }


def versions(meter: AllocatorMeter) -> Row:
    """Versions of the GPU, the driver and the libraries."""
    row: Row = {
        "versions": 1,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") or os.environ.get("PYTORCH_ALLOC_CONF", ""),
        "module_loading": os.environ.get("CUDA_MODULE_LOADING", ""),
    }
    if meter.device != "cuda":
        return {**row, "gpu": "none", "driver": None}
    found = torch.cuda.get_device_properties(0)
    more = {"gpu": found.name, "memory_bytes": found.total_memory, "capability": [found.major, found.minor]}
    return {**row, **more, "driver": GpuCounters().driver_version()}


def one_constant(meter: AllocatorMeter, names: list[str]) -> list[Row]:
    """A reading after the start of CUDA, then one after each named step, all in this process."""
    gpu = GpuCounters() if meter.device == "cuda" else None
    before = gpu.used_bytes() if gpu else None
    torch.ones(1, device=meter.device)
    rows: list[Row] = [{"steps": names, "after": "init", **(outside_memory(gpu, before) if gpu else {})}]
    for name in names:
        try:
            STEPS[name](meter)
        except (RuntimeError, TypeError, AttributeError) as error:
            rows.append({"steps": names, "after": name, "error": str(error)[:200]})
            continue
        rows.append({"steps": names, "after": name, **(outside_memory(gpu, before) if gpu else {})})
    return rows


def first_calls(meter: AllocatorMeter, name: str) -> list[Row]:
    """What the first, second and third call keep, in this thread and in autograd's. A workspace is kept by the first
    call."""
    kind, dtype_name = name.rsplit("_", 1)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype_name]
    x, weight, bias = (ones(meter, *shape, dtype=dtype) for shape in ((512, 512), (512, 512), (512,)))
    batch = ones(meter, 8, 512, 64, dtype=dtype)
    lstm = torch.nn.LSTM(64, 64, 2, dropout=0.1).to(meter.device, dtype) if kind == "rnn" else None
    calls: dict[str, tuple[Callable[[], Any], list[Any]]] = {
        "mm": (lambda: x @ weight, [x, weight]),
        "linear": (lambda: F.linear(x, weight, bias), [x, weight, bias]),
        "bmm": (lambda: batch @ batch.mT, [batch]),
        "rnn": (lambda: lstm(batch) if lstm is not None else None, [batch]),
        "conv": (lambda: F.conv2d(batch.view(8, 8, 64, 64), batch.view(-1)[:576].view(8, 8, 3, 3)), [batch]),
        "attention": (lambda: F.scaled_dot_product_attention(batch, batch, batch), [batch]),
        "sort": (lambda: x.sort(0), [x]),
        "linalg": (lambda: torch.linalg.svd(x.float()), [x]),
    }
    rows = []
    for number in (1, 2, 3):
        for row in forward_backward(meter, *calls[kind]):
            rows.append({"op": "first_call", "name": kind, "dtype": dtype_name, "call": number, **row})
    return rows


FIRST_CALLS = [
    *(f"{kind}_{dtype}" for kind in ("mm", "linear", "bmm") for dtype in ("fp32", "bf16", "fp16")),
    *("rnn_fp32", "conv_fp32", "attention_bf16", "sort_fp32", "linalg_fp32"),
]
