"""The results of a trial run: `report.json` and `events.bin`, written by `inside/` in the user's interpreter.

The two sides share no code (the user's interpreter has no CARMA), so this file is the contract between them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Literal, NamedTuple

from carma.core.model.values import Record
from carma.trial.layers.description import Described

FORMAT = 1
REPORT = "report.json"
EVENTS = "events.bin"

# Kinds of events. `what` is an index: of the op for ALLOC, of the call for CALL, of the mark for MARK.
ALLOC, FREE, CALL, MARK, EMPTY_CACHE, OTHER_STREAM = 1, 2, 3, 4, 5, 6
_record = struct.Struct("<BBHIQq")  # kind, thread, stream, what, id, bytes


class TrialEvent(NamedTuple):
    kind: int
    thread: int  # 0 is the one that runs the script; others are autograd's and the user's
    stream: int
    what: int
    id: int  # of the storage
    bytes: int


class Call(Record, frozen=True, kw_only=True):
    """A call whose library may allocate memory outside of tensors: a convolution, attention, a matrix product, an RNN.

    `sizes` and `numbers` are the op's own, in the order that `replay/conv_shapes.py` expects for convolutions.
    """

    op: str  # "conv", "conv_input_grad", "conv_weight_grad", "sdpa", "sdpa_grad", "rnn", "rnn_grad", "blas", ...
    dtype: str
    sizes: tuple[tuple[int, ...], ...] = ()
    numbers: tuple[int, ...] = ()
    flags: tuple[str, ...] = ()  # "tf32", "channels_last", "benchmark", "deterministic", "transposed", "causal", ...


class TrialReport(Record, frozen=True, kw_only=True):
    """One process's trial. `stop` says why it ended; figures are only worth anything after two optimizer steps.

    `cause`: "crashed", "no_network", "no_gpu" (never used), "several" (processes or GPUs), "" for all others.
    """

    format: int
    stop: Literal["steps", "end", "error", "unsupported"]
    cause: str = ""
    reason: str = ""  # a sentence, unless `stop` is "steps"
    torch: str = ""
    cuda: str = ""  # the CUDA version that this torch was built for; "" for a CPU build
    python: str = ""
    rank: int = 0
    world_size: int = 1
    steps: int = 0  # optimizer steps seen
    seconds: float = 0.0
    warnings: tuple[str, ...] = ()
    made_up_reads: int = 0  # invented values that the script read from the GPU
    ops: tuple[str, ...] = ()
    calls: tuple[Call, ...] = ()
    marks: tuple[str, ...] = ()  # "forward", "backward", "step", "step_end", "zero_grad", "eval"
    allocator: str = ""  # the allocator's settings as the script's environment has them
    flags: tuple[str, ...] = ()  # "compile", "benchmark", "ddp", "amp", "checkpoint", ...
    parameters_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    described: Described | None = None


def read_events(data: bytes) -> Iterator[TrialEvent]:
    return map(TrialEvent._make, _record.iter_unpack(data))
