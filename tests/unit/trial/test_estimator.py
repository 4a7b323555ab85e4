"""From a trial's report to a figure: refusals, parts of the footprint, warnings."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from msgspec.structs import replace

from carma.core.model.values import Estimate, Gpu, GpuId, NoEstimate, Owner, TaskId, TaskSpec
from carma.core.ports import EstimateRequest
from carma.trial.demand.prediction import demand_of
from carma.trial.estimator import TraceEstimator
from carma.trial.layers.description import Described, Layer
from carma.trial.protocol import Trial
from carma.trial.replay import card_constants as constants
from carma.trial.replay.bound import LEAST, SCALE, STRETCH, FootprintBound, Score, Scores, bound_for, group_of
from carma.trial.replay.footprint import figure
from carma.trial.replay.replay import Scratch
from carma.trial.report import ALLOC, CALL, FREE, Call, TrialEvent, TrialReport
from tests.trials import MIB, ScriptedTrials, events, report, write_events

H200 = Gpu(id=GpuId("GPU-0"), index=0, name="NVIDIA H200", memory_mib=143_771)
COMMAND = ("python", "train.py")


def asked(gpu: Gpu = H200, environment: dict[str, str] | None = None) -> EstimateRequest:
    spec = TaskSpec(command=COMMAND, directory="/", environment=environment or {})
    return EstimateRequest(task=TaskId(1), owner=Owner(1, 1, "a"), spec=spec, gpus=(gpu,))


def estimated(told: TrialReport | None = None, request: EstimateRequest | None = None) -> Estimate | NoEstimate:
    trial = Trial(report=told or report(), events=write_events(events()), seconds=1.0)
    return TraceEstimator(ScriptedTrials(COMMAND, trial), 0.99, (constants.SHIPPED,)).estimate(request or asked())


def test_the_footprint_is_the_replay_the_workspaces_and_the_context() -> None:
    answer = estimated()
    assert isinstance(answer, Estimate)
    # 4 weights, 8 state, 4 gradients, 40 activations; 33 and 32 of cuBLAS for the two threads that multiply.
    assert answer.allocated_mib == 4 + 8 + 4 + 40 + 33 + 32
    parts = answer.parts_mib
    assert parts["weights"] == parts["gradients"] == 4
    assert parts["optimizer_state"] == 8
    assert parts["workspaces"] == 65
    assert parts["activations"] == 40
    assert parts["context"] == 610 + 2 * 66
    assert answer.reserved_mib is not None
    assert answer.footprint_mib == pytest.approx(answer.reserved_mib + parts["context"], rel=0.01)
    assert sum(parts.values()) == pytest.approx(answer.reserved_mib + parts["context"], abs=4)
    assert answer.upper_mib >= answer.footprint_mib
    assert (answer.level, answer.steps_seen, answer.gpu_model) == (0.99, 3, "NVIDIA H200")


def test_what_it_keeps_busy_is_predicted_from_its_layers_for_the_card_that_is_asked_about() -> None:
    nothing = estimated(report(described=None))
    assert isinstance(nothing, Estimate)
    assert (nothing.demand, nothing.demand_predicted) == (None, False), "no layers were seen"
    shape = (4096, 1024)
    layers = (Layer(kind="Linear", output=shape, parameters=1024 * 1025, inputs=(shape,)),) * 8
    made = Described(layers=layers, batch=4096, parameters=8 * 1024 * 1025, input=shape, optimizer="SGD")
    here = estimated(report(described=made))
    assert isinstance(here, Estimate)
    assert here.demand == demand_of(made, "NVIDIA H200")
    assert here.demand is not None
    assert here.demand_predicted
    other = estimated(report(described=made), asked(replace(H200, name="NVIDIA Prototype")))
    assert isinstance(other, Estimate)
    assert (other.demand, other.demand_predicted) == (None, False), "the speed of that card is unknown"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"stop": "error", "reason": "ValueError: no data (train.py:3)"}, "ValueError: no data (train.py:3)"),
        ({"stop": "end", "reason": ""}, "did not get as far"),
        ({"steps": 1}, "only 1 optimizer step"),
        ({"parameters_bytes": 0}, "not on a GPU"),
        ({"allocator": "backend:cudaMallocAsync"}, "cudaMallocAsync"),
    ],
)
def test_what_is_worth_no_figure_is_refused_with_the_reason(changed: dict[str, object], said: str) -> None:
    answer = estimated(report(**changed))
    assert isinstance(answer, NoEstimate)
    assert said in answer.reason
    assert answer.source == "trace"


def test_without_a_caching_allocator_nothing_is_said() -> None:
    answer = estimated(request=asked(environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}))
    assert isinstance(answer, NoEstimate)


def test_the_first_warning_is_that_the_card_is_too_small() -> None:
    small = Gpu(id=GpuId("GPU-0"), index=0, name="Tesla T4", memory_mib=500)
    answer = estimated(request=asked(small))
    assert isinstance(answer, Estimate)
    assert "does not fit" in answer.warnings[0]
    assert any("measured on NVIDIA H200" in warning for warning in answer.warnings)


def test_an_older_card_has_smaller_workspaces() -> None:
    answer = estimated(request=asked(Gpu(id=GpuId("G"), index=0, name="NVIDIA A100-SXM4-40GB", memory_mib=40_960)))
    assert isinstance(answer, Estimate)
    assert answer.parts_mib["workspaces"] == round(2 * 8.125 + 1)


def test_the_environment_may_set_the_workspace() -> None:
    answer = estimated(request=asked(environment={"CUBLAS_WORKSPACE_CONFIG": ":16:8"}))
    assert isinstance(answer, Estimate)
    assert answer.parts_mib["workspaces"] == 1


def test_a_script_above_its_own_memory_fraction_is_a_doubt() -> None:
    for fraction, is_over in (("0.1", False), ("0.0005", True)):
        answer = estimated(report(allocator=f"per_process_memory_fraction:{fraction}"))
        assert isinstance(answer, Estimate)
        assert any("more memory than its own limit" in warning for warning in answer.warnings) is is_over


def test_doubts_become_warnings() -> None:
    answer = estimated(report(made_up_reads=1000, flags=("guessed_sizes",)))
    assert isinstance(answer, Estimate)
    text = " ".join(answer.warnings)
    assert "1000 values" in text
    assert "largest possible" in text


@pytest.mark.parametrize(("world_size", "nccl_mib"), [(1, None), (2, 544), (8, 688)])
def test_processes_that_talk_to_one_another_need_nccl(world_size: int, nccl_mib: int | None) -> None:
    alone, answer = estimated(), estimated(report(world_size=world_size))
    assert isinstance(alone, Estimate)
    assert isinstance(answer, Estimate)
    assert answer.parts_mib.get("nccl") == nccl_mib
    assert answer.footprint_mib - alone.footprint_mib == (nccl_mib or 0)
    assert any("NCCL" in warning for warning in answer.warnings) == (nccl_mib is not None)


# Bounds.

POINT = 1000.0 * MIB


def scores(count: int, group: str = "plain", spread: float = 0.0) -> Scores:
    cases = (Score(f"family{n % 7}", group, n / 1000, spread) for n in range(count))
    return Scores(cases=tuple(cases))


def margin(bound: FootprintBound) -> float:
    return math.log(bound.upper_bytes / POINT)


def test_the_margin_is_the_conformal_quantile() -> None:
    bound = bound_for(POINT, 0.0, "plain", 0.9, scores(99))  # the 90th of 99 scores: 0.089
    assert margin(bound) == pytest.approx(STRETCH * 0.089)
    assert (bound.level, bound.warnings) == (0.9, ())


def test_replays_that_lie_apart_widen_it() -> None:
    near, far = (bound_for(POINT, spread, "plain", 0.9, scores(99)) for spread in (0.0, SCALE))
    assert margin(far) == pytest.approx(2 * margin(near))
    assert margin(bound_for(POINT, SCALE, "plain", 0.9, scores(99, spread=SCALE))) == pytest.approx(margin(near))


def test_a_margin_is_never_nothing() -> None:
    sure = Scores(cases=tuple(Score("f", "plain", -0.1) for _ in range(200)))
    assert margin(bound_for(POINT, 0.0, "plain", 0.99, sure)) == pytest.approx(LEAST)


def test_a_group_that_is_too_small_goes_by_the_larger_one() -> None:
    strict, half = scores(5, "conv-strict").cases, scores(120, "conv-half").cases
    bound = bound_for(POINT, 0.0, "conv-strict", 0.99, Scores(cases=(*strict, *half)))
    assert margin(bound) == pytest.approx(STRETCH * 0.119)  # the 125th of 125
    assert bound.level == 0.99


def test_too_few_cases_for_the_level_are_said() -> None:
    bound = bound_for(POINT, 0.0, "plain", 0.99, scores(49))
    assert margin(bound) == pytest.approx(STRETCH * 0.048)
    assert bound.level == 0.98
    assert "too few" in bound.warnings[0]
    nothing = bound_for(POINT, 0.0, "plain", 0.99, Scores(cases=()))
    assert "a quarter is added" in nothing.warnings[0]


def test_benchmark_mode_is_promised_less() -> None:
    assert bound_for(POINT, 0.0, "benchmark", 0.99, scores(99, "benchmark")).level == 0.9


@pytest.mark.parametrize(
    ("calls", "flags", "group"),
    [
        ((Call(op="conv", dtype="float32", flags=("tf32",)),), (), "conv-tf32"),
        ((Call(op="conv", dtype="float32"), Call(op="conv", dtype="float16")), (), "conv-strict"),
        ((Call(op="conv", dtype="bfloat16"),), (), "conv-half"),
        ((Call(op="conv", dtype="bfloat16"), Call(op="conv", dtype="float32", flags=("tf32",))), (), "conv-mixed"),
        ((Call(op="conv", dtype="float32", flags=("benchmark",)),), ("guessed_sizes",), "benchmark"),
        ((Call(op="conv", dtype="float16"),), ("guessed_sizes",), "guessed"),
        ((Call(op="rnn", dtype="float32"),), (), "recurrent"),
        ((), (), "plain"),
    ],
)
def test_groups(calls: tuple[Call, ...], flags: tuple[str, ...], group: str) -> None:
    assert group_of(report(calls=(*report().calls, *calls), flags=flags)) == group


def test_events_that_contradict_one_another_are_refused() -> None:
    twice = [*events(), TrialEvent(2, 0, 0, 0, 999, 0)]
    trial = Trial(report=report(), events=write_events(twice), seconds=1.0)
    answer = TraceEstimator(ScriptedTrials(COMMAND, trial), 0.99, (Path("nowhere"),)).estimate(asked())
    assert isinstance(answer, NoEstimate)
    assert "contradict" in answer.reason


def test_a_trial_with_convolutions_is_replayed_with_other_workspaces_too() -> None:
    """A workspace that just fits into a hole would not if it were a little larger."""
    conv = Call(op="conv", dtype="float32", sizes=((8, 64, 56, 56), (64, 64, 3, 3), (8, 64, 56, 56)), flags=("tf32",))
    told = report(calls=(*report().calls, conv))
    hole = 400 * MIB
    call = [TrialEvent(ALLOC, 0, 0, 1, 90, hole), TrialEvent(FREE, 0, 0, 0, 90, 0), TrialEvent(CALL, 0, 0, 2, 0, 0)]

    trial = Trial(report=told, events=write_events([*call, *events()]), seconds=1.0)
    found = figure(trial, asked(), (constants.SHIPPED,), lambda _call: Scratch(transient_bytes=(hole,)))
    assert found.footprint_bytes > found.replayed.peaks.reserved_bytes + found.outside_bytes
    assert found.spread > 0
    plain = figure(Trial(report=report(), events=trial.events[72:], seconds=1.0), asked(), (constants.SHIPPED,))
    assert plain.spread == 0
