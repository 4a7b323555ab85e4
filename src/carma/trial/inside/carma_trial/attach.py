"""Attaches the emulated GPU to a freshly imported torch.

1. Kernels: those of the compiled part for every operator that has one for CUDA, and ours for what they cannot compute.
2. `torch.cuda` and other functions that query the GPU.
3. The observation of the script's steps.
"""

import os
import re
import warnings

import torch

from . import (
    attention,
    build,
    convolution,
    cuda_api,
    gpu_processes,
    kernels,
    parallel,
    replaces,
    report,
    rnn,
    shortcuts,
    storages,
    values,
    watch,
)

# Kernels of their own in shim.cpp: as_strided and similar operators only change the view of a storage.
_IN_SHIM = frozenset((
    "empty.memory_format", "empty_strided", "as_strided", "view", "_reshape_alias", "unfold", "resize_", "set_",
    "copy_",
    "set_.source_Storage_storage_offset", "set_.source_Storage", "set_.source_Tensor", "record_stream",
))  # fmt: skip
# cuBLAS and cuBLASLt keep a workspace for each thread and stream that calls them.
_BLAS = ("mm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "addr")
_BLAS_LT = ("addmm", "_addmm_activation", "_scaled_mm", "_int_mm", "linear")
_CUDA_BUILD_OPS = 500  # a CPU build has kernels for CUDA for fewer operators


def attach():
    gpu_processes.install(cuda_api.COUNT)
    report.facts.update(
        torch=str(torch.__version__),
        cuda=str(torch.version.cuda or ""),
        allocator=os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "",
        rank=int(os.environ.get("RANK") or 0),
        world_size=int(os.environ.get("WORLD_SIZE") or 1),
        steps=0,
    )
    _attach_kernels()
    for module in (cuda_api, attention, rnn, shortcuts, storages, values, parallel, watch):
        module.install()
    _follow_libraries()


def _attach_kernels():
    warnings.filterwarnings("ignore", message=".*Overriding a previously registered kernel")
    own = {}
    for module in (convolution, rnn, attention, kernels, values):
        own |= module.KERNELS
    names = sorted(_cuda_ops() - _IN_SHIM - set(own))
    lib = build.library
    problem = lib.carma_attach(("\n".join(names) + "\n").encode(), cuda_api.COUNT, cuda_api.MULTIPROCESSORS)
    if problem:
        report.refuse("unsupported", f"this torch does not take the emulated GPU: {problem.decode(errors='replace')}")
    for call, ops in (("blas", _BLAS), ("blas_lt", _BLAS_LT)):
        for name in ops:
            lib.carma_blas(f"aten::{name}".encode(), report.call(call))
    lib.carma_untouched(b"aten::_amp_foreach_non_finite_check_and_unscale_")  # gradients are finite
    kernels.register(own, "CUDA")


def _follow_libraries():
    """Libraries that are loaded later bring kernels for CUDA of their own, which cannot run."""

    @replaces(torch.ops, "load_library")
    def load_library(load, path):
        load(path)
        for name in torch._C._dispatch_get_all_op_names():
            space, _, op = name.partition("::")
            if space not in ("aten", "carma") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
                build.library.carma_override(space.encode(), op.encode())
        values.register_library_kernels()


def _cuda_ops():
    """The operators that have a kernel for CUDA: a CUDA build knows; a CPU build has the list that it was made from."""
    names = [name[len("aten::") :] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    here = {name for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA")}
    return here if len(here) > _CUDA_BUILD_OPS else _listed().intersection(names)


def _listed():
    path = os.path.join(os.path.dirname(os.path.dirname(torch.__file__)), "torchgen/packaged/ATen/native")
    with open(os.path.join(path, "native_functions.yaml"), encoding="utf-8") as file:
        text = file.read()
    found, delegates = set(), {}
    for block in re.split(r"\n(?=- func: )", text):
        name = re.match(r"- func: ([\w.]+)", block)
        if not name:
            continue
        delegate = re.search(r"\n  structured_delegate: ([\w.]+)", block)
        if delegate:
            delegates[name[1]] = delegate[1]
        dispatch = re.search(r"\n  dispatch:\n((?:    .*\n?)+)", block)
        if dispatch and re.search(r"^    (?:[^:#]*[ ,])?CUDA[,:]", dispatch[1], re.MULTILINE):
            found.add(name[1])
    return found | {name for name, delegate in delegates.items() if delegate in found}
