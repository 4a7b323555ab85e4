"""The kind of attention in a trial run, derived from its flags and from the memory of a softmax."""

from __future__ import annotations

import pytest

from carma.trial.layers.description import Described, Layer
from carma.trial.protocol import Trial
from carma.trial.replay.library_memory import with_attention
from carma.trial.report import ALLOC, FREE, TrialEvent
from tests.trials import report, write_events

OPS = ("", "aten::addmm", "aten::_softmax", "aten::_log_softmax", "aten::_softmax_backward_data")
SOFTMAX, LOG_SOFTMAX, BACKWARD = 2, 3, 4
SCORES_BYTES = 4 * 8 * 128 * 128 * 4


def attending(**changed: object) -> Described:
    layers = tuple(Layer(kind="Linear", output=(4, 128, 512), parameters=512 * 512) for _ in range(4))
    told: dict[str, object] = {"layers": layers, "batch": 4, "heads": 8}
    return Described(**{**told, **changed})  # type: ignore[arg-type]


def trial(op: int, size: int, *flags: str, kind: int = ALLOC) -> Trial:
    event = TrialEvent(kind=kind, thread=0, stream=0, what=op, id=1, bytes=size)
    return Trial(report=report(ops=OPS, flags=flags), events=write_events([event]), seconds=1.0)


@pytest.mark.parametrize("size", [SCORES_BYTES, SCORES_BYTES // 2])
@pytest.mark.parametrize("flags", [(), ("sdpa_efficient",)])
def test_a_softmax_of_the_size_of_the_scores_was_written_out(size: int, flags: tuple[str, ...]) -> None:
    assert with_attention(attending(), trial(SOFTMAX, size, *flags)).attention == "eager"


@pytest.mark.parametrize(
    ("op", "size", "kind"),
    [
        (SOFTMAX, SCORES_BYTES // 20, ALLOC),  # over windows
        (SOFTMAX, SCORES_BYTES, FREE),
        (LOG_SOFTMAX, SCORES_BYTES, ALLOC),  # a loss
        (BACKWARD, SCORES_BYTES, ALLOC),
    ],
)
def test_everything_else_is_not(op: int, size: int, kind: int) -> None:
    assert with_attention(attending(), trial(op, size, kind=kind)).attention == ""
    assert with_attention(attending(), trial(op, size, "sdpa_flash", "amp", kind=kind)).attention == "sdpa"


@pytest.mark.parametrize("changed", [{"heads": None}, {"batch": None}, {"layers": ()}])
def test_the_kind_is_unknown_without_heads_a_batch_or_layers(changed: dict[str, object]) -> None:
    assert with_attention(attending(**changed), trial(SOFTMAX, SCORES_BYTES)).attention == ""
    assert with_attention(attending(**changed), trial(SOFTMAX, SCORES_BYTES, "sdpa_cudnn")).attention == "sdpa"
