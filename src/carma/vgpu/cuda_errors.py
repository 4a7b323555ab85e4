"""The errors of a virtual GPU, and the text that a PyTorch program prints for them, word for word: outcomes are
recognised by it."""

from __future__ import annotations

from carma.vgpu.device_state import VirtualGpu

_TRACEBACK = """Traceback (most recent call last):
  File "carma/vgpu/virtual_task.py", line 1, in <module>
    step()
"""
_DEVICE_LOST = (
    f"{_TRACEBACK}RuntimeError: CUDA error: unspecified launch failure\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
)


class DeviceLost(Exception):
    """The GPU failed under its process; the text is PyTorch's."""

    def __init__(self) -> None:
        super().__init__(_DEVICE_LOST)


class OutOfDeviceMemory(Exception):
    """An allocation beyond the memory of the device, or beyond the limit of the process."""

    def __init__(
        self, gpu: VirtualGpu, asked_mib: int, held_mib: int, others: dict[int, int], limit_mib: int | None
    ) -> None:
        super().__init__(f"{asked_mib} MiB asked for on virtual GPU {gpu.index} do not fit")
        self.gpu, self.asked_mib, self.held_mib = gpu, asked_mib, held_mib
        self.others, self.limit_mib = others, limit_mib

    def as_pytorch(self, ordinal: int) -> str:
        """torch 2.x's OutOfMemoryError; `ordinal` is the GPU's place in CUDA_VISIBLE_DEVICES, as CUDA counts."""
        free_mib = self.gpu.memory_mib - self.held_mib - sum(self.others.values())
        neighbours = "".join(f"Process {pid} has {_size(mib)} memory in use. " for pid, mib in self.others.items())
        allowed = f"{_size(self.limit_mib)} allowed; " if self.limit_mib is not None else ""
        return (
            f"{_TRACEBACK}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {_size(self.asked_mib)}. "
            f"GPU {ordinal} has a total capacity of {_size(self.gpu.memory_mib)} of which {_size(free_mib)} is free. "
            f"{neighbours}Including non-PyTorch memory, this process has {_size(self.held_mib)} memory in use. "
            f"{allowed}Of the allocated memory {_size(self.held_mib)} is allocated by PyTorch, and 0 bytes is reserved "
            "by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
            "Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
        )


def _size(mib: int) -> str:
    """As PyTorch's allocator prints it."""
    if mib <= 0:
        return "0 bytes"
    return f"{mib / 1024:.2f} GiB" if mib > 1024 else f"{mib:.2f} MiB"
