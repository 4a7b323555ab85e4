"""Puts the made-up GPU under a freshly imported torch: kernels, the `torch.cuda` façade, the watch over the steps."""

import json
import os
import re
import warnings

from . import build, cuda_api, finite_values, gpu_processes, kernels, parallel, report, rnn, shortcuts, storages, watch

# Kernels of their own in shim.cpp: as_strided and the like only change how a storage is looked at.
_IN_SHIM = frozenset((
    "empty.memory_format", "empty_strided", "as_strided", "view", "_reshape_alias", "unfold", "resize_", "set_",
    "copy_",
    "set_.source_Storage_storage_offset", "set_.source_Storage", "set_.source_Tensor", "record_stream",
))  # fmt: skip
# cuBLAS and cuBLASLt keep a workspace for each thread and stream that calls them.
_BLAS = ("mm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "addr")
_BLAS_LT = ("addmm", "_addmm_activation", "_scaled_mm", "_int_mm", "linear")


def attach(torch):
    gpu = json.loads(os.environ.get("CARMA_TRACE_GPU") or "{}")
    lib = build.library
    gpu_processes.install(int(gpu.get("count", 1)))
    report.facts.update(
        torch=str(torch.__version__),
        cuda=str(torch.version.cuda or ""),
        allocator=os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "",
        rank=int(os.environ.get("RANK") or 0),
        world_size=int(os.environ.get("WORLD_SIZE") or 1),
    )
    warnings.filterwarnings("ignore", message=".*Overriding a previously registered kernel")
    own = kernels.overrides(torch, gpu)
    names = sorted(_cuda_ops(torch) - _IN_SHIM - set(own))
    trouble = lib.carma_attach(
        ("\n".join(names) + "\n").encode(), int(gpu.get("count", 1)), int(gpu.get("multiprocessors", 132))
    )
    if trouble:
        report.refuse("unsupported", f"this torch does not take the made-up GPU: {trouble.decode(errors='replace')}")
    _name_blas(lib)
    cuda_api.install(torch, gpu)
    kernels.install(torch, own, gpu)
    rnn.install(torch)
    shortcuts.install(torch)
    storages.install(torch)
    finite_values.install(torch)
    parallel.install(torch)
    watch.install(torch)
    _follow_libraries(torch)


def _follow_libraries(torch):
    """Libraries that are loaded later bring kernels for CUDA of their own, which cannot run."""
    load = torch.ops.load_library

    def load_library(path):
        load(path)
        for name in torch._C._dispatch_get_all_op_names():
            space, _, op = name.partition("::")
            if space not in ("aten", "carma") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
                build.library.carma_override(space.encode(), op.encode())
        kernels.of_libraries(torch)

    torch.ops.load_library = load_library


def _name_blas(lib):
    plain, lt = report.call("blas"), report.call("blas_lt")
    for name in _BLAS:
        lib.carma_blas(f"aten::{name}".encode(), plain)
    for name in _BLAS_LT:
        lib.carma_blas(f"aten::{name}".encode(), lt)
    lib.carma_untouched(b"aten::_amp_foreach_non_finite_check_and_unscale_")  # gradients are finite


def _cuda_ops(torch):
    """Which ops have a kernel for CUDA: a CUDA build knows; for a CPU build the list that it was made from tells."""
    names = [name[len("aten::") :] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    here = {name for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA")}
    if len(here) > 500:
        return here
    listed = _listed(torch)
    return {name for name in names if name in listed}


def _listed(torch):
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
