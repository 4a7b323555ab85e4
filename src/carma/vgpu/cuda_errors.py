"""What a PyTorch program writes when the device fails it, word for word, because outcomes are recognised from it."""

from __future__ import annotations

from carma.vgpu.device import OutOfDeviceMemory

_TRACEBACK = """Traceback (most recent call last):
  File "carma/vgpu/virtual_task.py", line 1, in <module>
    step()
"""


def out_of_memory(error: OutOfDeviceMemory, ordinal: int) -> str:
    """torch 2.x's OutOfMemoryError; `ordinal` is the GPU's place in CUDA_VISIBLE_DEVICES, as CUDA counts."""
    free_mib = error.gpu.memory_mib - error.held_mib - sum(error.others.values())
    neighbours = "".join(f"Process {pid} has {_size(mib)} memory in use. " for pid, mib in error.others.items())
    allowed = f"{_size(error.limit_mib)} allowed; " if error.limit_mib is not None else ""
    return (
        f"{_TRACEBACK}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {_size(error.asked_mib)}. "
        f"GPU {ordinal} has a total capacity of {_size(error.gpu.memory_mib)} of which {_size(free_mib)} is free. "
        f"{neighbours}Including non-PyTorch memory, this process has {_size(error.held_mib)} memory in use. {allowed}"
        f"Of the allocated memory {_size(error.held_mib)} is allocated by PyTorch, and 0 bytes is reserved by PyTorch "
        "but unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
        "Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )


def device_lost() -> str:
    return (
        f"{_TRACEBACK}RuntimeError: CUDA error: unspecified launch failure\n"
        "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
        "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
    )


def _size(mib: int) -> str:
    """As PyTorch's allocator prints it."""
    if mib <= 0:
        return "0 bytes"
    return f"{mib / 1024:.2f} GiB" if mib > 1024 else f"{mib:.2f} MiB"
