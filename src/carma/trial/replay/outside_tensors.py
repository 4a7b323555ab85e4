"""What a process holds on a card outside its allocator: the context, and a handle for each library that it uses.

The readings are those of `inside/carma_measure` (Constants). On an H200 with torch 2.11: 610 MiB at the start, 66 MiB
for each thread that multiplies matrices (cuBLAS makes a handle for each, and autograd has threads of its own), 18 MiB
once cuDNN is used; other kernels add next to nothing, since they are loaded from the same few modules.
"""

from __future__ import annotations

from collections.abc import Iterable

from carma.trial.replay.card_constants import Constants
from carma.trial.report import CALL, Event, Report

BLAS = frozenset(("blas", "blas_lt"))
_CUDNN = ("conv", "rnn", "sdpa_cudnn")
_BY_OP = {"fft": ("aten::_fft_",), "linalg": ("aten::linalg_", "aten::_linalg_", "aten::_cholesky")}
_PLAIN = frozenset(("aten::linalg_vector_norm", "aten::linalg_cross"))  # no solver takes part
MIB = 1 << 20
_DEFAULT = {"init": 610 * MIB, "matmul_fp32": 66 * MIB, "conv_fp32": 18 * MIB}  # where a card's file lacks one


# Of NCCL for one group of processes, which takes it from the driver (reported on an A100: NVIDIA/nccl issue 964).
NCCL_PAIR_BYTES, NCCL_BYTES = 544 * MIB, 688 * MIB


def nccl_bytes(report: Report) -> int:
    """Nothing for a process that is alone: it talks to nobody."""
    if report.world_size < 2:
        return 0
    return NCCL_PAIR_BYTES if report.world_size == 2 else NCCL_BYTES


def outside_bytes(constants: Constants | None, report: Report, events: Iterable[Event]) -> int:
    alone = {each.after: each.outside_bytes for each in constants.contexts if each.alone} if constants else {}
    start = _start(constants)

    def added(name: str) -> int:
        return max(0, alone[name] - start) if name in alone else _DEFAULT.get(name, 0)

    total = start + nccl_bytes(report) + blas_threads(report, events) * added("matmul_fp32")
    if uses_cudnn(report):
        total += added("conv_fp32")
    for name, prefixes in _BY_OP.items():
        if any(op.startswith(prefixes) and op not in _PLAIN for op in report.ops):
            total += added(name)
    return total


def blas_threads(report: Report, events: Iterable[Event]) -> int:
    blas = {index for index, call in enumerate(report.calls) if call.op in BLAS}
    return len({event.thread for event in events if event.kind == CALL and event.what in blas})


def uses_cudnn(report: Report) -> bool:
    return "sdpa_cudnn" in report.flags or any(call.op.startswith(_CUDNN) for call in report.calls)


def _start(constants: Constants | None) -> int:
    readings = [each.outside_bytes for each in constants.contexts if each.after == "init"] if constants else []
    return min(readings, default=_DEFAULT["init"])
