"""Registers kernels, and allocates what several of them need."""

import torch

libraries = {}  # torch forgets the kernels of a library object that is gone


def register(kernels, *keys, space="aten"):
    """`kernels`: function by operator. `keys`: of torch's dispatcher."""
    if space not in libraries:
        libraries[space] = torch.library.Library(space, "IMPL")
    for name, kernel in kernels.items():
        for key in keys:
            try:
                libraries[space].impl(name, kernel, key, allow_override=True)
            except TypeError:  # before torch 2.6
                libraries[space].impl(name, kernel, key)


def plain_like(tensor):
    """Of the same shape, contiguous."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def room(count, device):
    """So many bytes."""
    return torch.empty((count,), dtype=torch.uint8, device=device)


def dtype_name(tensor):
    return str(tensor.dtype).removeprefix("torch.")
