"""Memory that libraries hold beside the tensors that a trial run shows.

1. `card_workspaces`: workspaces inside the allocator. cuDNN's are those of `conv_workspaces`. cuBLAS keeps one for each
   thread and stream, allocated at its first product: PyTorch gives it 32 MiB on Hopper and Blackwell, 8.125 MiB
   elsewhere (`:4096:2:16:8`), unless CUBLAS_WORKSPACE_CONFIG sets another size. cuBLASLt, which adds a bias in the same
   kernel, has 1 MiB more. Measured figures of the GPU take precedence.
2. `outside_bytes`: memory outside the allocator, as `inside/carma_measure` read it. On an H200 with torch 2.11: 610 MiB
   for the context, 66 MiB for each thread that multiplies matrices (cuBLAS makes a handle for each, and autograd has
   threads of its own), 18 MiB once cuDNN is used. Other kernels add little, since they are in the same few modules.
3. `with_attention`: whether attention stored its scores. Layers do not show it: a setting chooses the function.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import prod

from msgspec.structs import replace

from carma.trial.layers.description import Described
from carma.trial.layers.kinds import kind_of
from carma.trial.protocol import Trial
from carma.trial.replay.card_constants import CardConstants
from carma.trial.replay.conv_shapes import OPS as CONVOLUTIONS
from carma.trial.replay.replay import NO_SCRATCH, Scratch, Workspaces
from carma.trial.report import ALLOC, CALL, Call, TrialEvent, TrialReport, read_events

MIB = 1 << 20
HOPPER_WORKSPACE_BYTES, WORKSPACE_BYTES, LT_EXTRA_BYTES = 32 * MIB, 8_519_680, 1 * MIB
BLAS = frozenset(("blas", "blas_lt"))
_CUDNN = ("conv", "rnn", "sdpa_cudnn")
_BY_OP = {"fft": ("aten::_fft_",), "linalg": ("aten::linalg_", "aten::_linalg_", "aten::_cholesky")}
_WITHOUT_SOLVER = frozenset(("aten::linalg_vector_norm", "aten::linalg_cross"))
_DEFAULT = {"init": 610 * MIB, "matmul_fp32": 66 * MIB, "conv_fp32": 18 * MIB}  # if the GPU's file has no figure
# NCCL allocates this outside torch, for one group of processes (reported on an A100: NVIDIA/nccl issue 964).
NCCL_PAIR_BYTES, NCCL_BYTES = 544 * MIB, 688 * MIB

_FUSED = "sdpa_"  # prefix of the report's flags for torch's fused attention
_LINEAR = ("linear", "conv1d")
_SHARE = 0.2  # of the counted scores: some layers have longer rows than attention
_SCORE_BYTES = 2  # least size of a score


def card_workspaces(convolutions: Workspaces, products: Mapping[str, Scratch]) -> Workspaces:
    """Workspaces of one GPU. A call of another kind allocates nothing."""

    def workspaces(call: Call) -> Scratch:
        return convolutions(call) if call.op in CONVOLUTIONS else products.get(call.op, NO_SCRATCH)

    return workspaces


def blas_scratch(
    constants: CardConstants | None, capability: tuple[int, int], environment: Mapping[str, str]
) -> dict[str, Scratch]:
    """Scratch memory of cuBLAS by operator."""
    plain, extra = HOPPER_WORKSPACE_BYTES if capability >= (9, 0) else WORKSPACE_BYTES, LT_EXTRA_BYTES
    if constants is not None and constants.capability == capability:
        plain = constants.kept_once.get("mm_fp32_forward", plain)
        extra = max(0, constants.kept_once.get("linear_fp32_forward", plain + LT_EXTRA_BYTES) - plain)
    configured = _configured(environment.get("CUBLAS_WORKSPACE_CONFIG", ""))
    product = ("blas", plain if configured is None else configured)
    return {"blas": Scratch(kept=(product,)), "blas_lt": Scratch(kept=(product, ("blas_lt", extra)))}


def _configured(text: str) -> int | None:
    """`:SIZE:COUNT:SIZE:COUNT…`, in KiB; None if it is not set or has another form."""
    if not re.fullmatch(r"(:\d+:\d+)+", text):
        return None
    numbers = [int(number) for number in text.split(":")[1:]]
    return sum(size * count for size, count in zip(numbers[::2], numbers[1::2], strict=True)) * 1024


def nccl_bytes(report: TrialReport) -> int:
    """0 for a single process, which does not communicate."""
    if report.world_size < 2:
        return 0
    return NCCL_PAIR_BYTES if report.world_size == 2 else NCCL_BYTES


def outside_bytes(constants: CardConstants | None, report: TrialReport, events: Iterable[TrialEvent]) -> int:
    contexts = constants.contexts if constants else ()
    start = min((each.outside_bytes for each in contexts if each.after == "init"), default=_DEFAULT["init"])
    alone = {each.after: each.outside_bytes - start for each in contexts if each.alone}

    def added(name: str) -> int:
        return max(0, alone.get(name, _DEFAULT.get(name, 0)))

    used = [name for name, prefixes in _BY_OP.items() if any(_uses(op, prefixes) for op in report.ops)]
    if "sdpa_cudnn" in report.flags or any(call.op.startswith(_CUDNN) for call in report.calls):
        used.append("conv_fp32")
    return start + nccl_bytes(report) + _blas_threads(report, events) * added("matmul_fp32") + sum(map(added, used))


def _uses(op: str, prefixes: tuple[str, ...]) -> bool:
    return op.startswith(prefixes) and op not in _WITHOUT_SOLVER


def _blas_threads(report: TrialReport, events: Iterable[TrialEvent]) -> int:
    blas = {index for index, call in enumerate(report.calls) if call.op in BLAS}
    return len({event.thread for event in events if event.kind == CALL and event.what in blas})


def with_attention(described: Described, trial: Trial) -> Described:
    """Eager if a softmax was about as large as one layer's scores. Over windows, or of a gate, it is much smaller."""
    fused = any(flag.startswith(_FUSED) for flag in trial.report.flags)
    if (scores := _scores(described)) and _largest_softmax_bytes(trial) >= _SHARE * _SCORE_BYTES * scores:
        return replace(described, attention="eager")
    return replace(described, attention="sdpa") if fused else described


def _scores(described: Described) -> int:
    """Number of scores in one layer, as `gpumemnet` counts them; 0 if the heads or the batch are unknown."""
    batch, heads = described.batch or 0, described.heads or 0
    if not batch or not heads:
        return 0
    linear = (layer for layer in described.layers if layer.output and kind_of(layer.kind) in _LINEAR)
    length = max((prod(layer.output[:-1]) // batch for layer in linear), default=0)
    return batch * heads * length * length


def _largest_softmax_bytes(trial: Trial) -> int:
    ops = _forward_softmaxes(trial.report)
    sizes = (event.bytes for event in read_events(trial.events) if event.kind == ALLOC and event.what in ops)
    return max(sizes, default=0) if ops else 0


def _forward_softmaxes(report: TrialReport) -> frozenset[int]:
    """Indices of these ops; a logarithm of a softmax is a loss."""
    names = ("log_softmax", "backward")
    found = (place for place, op in enumerate(report.ops) if "softmax" in op and not any(name in op for name in names))
    return frozenset(found)
