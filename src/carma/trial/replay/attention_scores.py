"""Whether a trial's attention stored its scores. Layers do not show it: a setting chooses the function."""

from __future__ import annotations

from math import prod

from msgspec.structs import replace

from carma.trial.layers.description import Described
from carma.trial.layers.kinds import kind_of
from carma.trial.protocol import Trial
from carma.trial.report import ALLOC, Report, read_events

_FUSED = "sdpa_"  # prefix of the report's flags for torch's fused function
_LINEAR = ("linear", "conv1d")
_SHARE = 0.2  # of the counted scores: some layers have longer rows than attention
_SCORE_BYTES = 2  # least size of a score


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


def _forward_softmaxes(report: Report) -> frozenset[int]:
    """Indices of these ops; a logarithm of a softmax is a loss."""
    names = ("log_softmax", "backward")
    found = (place for place, op in enumerate(report.ops) if "softmax" in op and not any(name in op for name in names))
    return frozenset(found)
