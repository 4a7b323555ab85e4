"""Whether a trial's attention wrote its scores out. Layers do not tell: it is a function, and a setting chooses it."""

from __future__ import annotations

from math import prod

from msgspec.structs import replace

from carma.trial.layers.description import Described
from carma.trial.layers.kinds import kind_of
from carma.trial.protocol import Trial
from carma.trial.report import ALLOC, Report, read_events

_FUSED = "sdpa_"  # how flags of a trial's report begin: the way that torch's function took
_LINEAR = ("linear", "conv1d")
_SHARE = 0.2  # of the scores that are counted: some layers see longer rows than attention does
_LEAST_BYTES = 2  # of a score


def with_attention(described: Described, trial: Trial) -> Described:
    """Eager where a softmax was about as large as one layer's scores. Over windows, or of a gate, it is far smaller."""
    fused = any(flag.startswith(_FUSED) for flag in trial.report.flags)
    if (scores := _scores(described)) and _largest_softmax_bytes(trial) >= _SHARE * _LEAST_BYTES * scores:
        return replace(described, attention="eager")
    return replace(described, attention="sdpa") if fused else described


def _scores(described: Described) -> int:
    """Of one layer, as `gpumemnet.features` counts them; 0 where heads or the batch are not known."""
    batch, heads = described.batch or 0, described.heads or 0
    if not batch or not heads:
        return 0
    linear = (layer for layer in described.layers if layer.output and kind_of(layer.kind) in _LINEAR)
    length = max((prod(layer.output[:-1]) // batch for layer in linear), default=0)
    return batch * heads * length * length


def _largest_softmax_bytes(trial: Trial) -> int:
    ops = _softmaxes(trial.report)
    if not ops:
        return 0
    sizes = (event.bytes for event in read_events(trial.events) if event.kind == ALLOC and event.what in ops)
    return max(sizes, default=0)


def _softmaxes(report: Report) -> frozenset[int]:
    """Forward passes only; a logarithm of it is a loss."""
    return frozenset(
        place
        for place, op in enumerate(report.ops)
        if "softmax" in op and "log_softmax" not in op and "backward" not in op
    )
