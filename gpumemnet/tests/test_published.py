"""The published estimators: figures worked out by hand from each method, published ones where there are any."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from carma.core.model.settings import Memory, Rules
from carma.core.model.values import Estimate, Gpu, GpuId, NoEstimate, Owner, TaskId, TaskSpec
from carma.core.ports import EstimateRequest, Estimator
from carma.estimate.combination import make_estimators
from carma.store.memory import MemoryStore
from carma.trial.layers.description import Described, Layer
from carma.trial.protocol import Context, NoTrials, Trial, Trials
from carma.trial.report import ALLOC, FORMAT, FREE, MARK, TrialEvent, TrialReport
from gpumemnet.summaries import read_text
from tests.harness import python_path
from tests.trials import write_events

MIB = 1 << 20
NAMES = ("horus", "fake-tensor", "dnnmem", "llmem", "zero2", "zero3", "accelerate")
CONTEXT_MIB = 760


class Told:
    """Trials that know their answer."""

    def __init__(self, described: Described | None = None, trial: Trial | None = None) -> None:
        self._described, self._trial = described, trial

    def run(self, request: EstimateRequest) -> Trial | NoEstimate:
        return self._trial or NoEstimate(source="trace", reason=f"{request.spec.command[0]} made no step")

    def describe(self, request: EstimateRequest) -> Described | NoEstimate:
        return self._described or NoEstimate(source="trace", reason=f"{request.spec.command[0]} made no step")


def made(name: str, trials: Trials) -> Estimator:
    gpu = Gpu(id=GpuId("GPU-0"), index=0, name="Test GPU", memory_mib=40_960)
    rules = Rules(memory=Memory(sources=(name,)))
    (estimator,) = make_estimators(Context(archive=MemoryStore(), gpus=(gpu,), rules=rules, trials=trials))
    return estimator


def ask(name: str, trials: Trials, *, gpus: int = 1) -> Estimate | NoEstimate:
    spec = TaskSpec(command=("python", "train.py"), directory="/", gpus=gpus)
    request = EstimateRequest(task=TaskId(1), owner=Owner(1, 1, "alice"), spec=spec, gpus=())
    answer = made(name, trials).estimate(request)
    assert answer.source == name
    return answer


def answered(name: str, described: Described, *, gpus: int = 1) -> Estimate:
    answer = ask(name, Told(described), gpus=gpus)
    assert isinstance(answer, Estimate), answer
    assert answer.upper_mib == answer.footprint_mib
    assert answer.level is None
    assert answer.warnings
    assert abs(sum(answer.parts_mib.values()) - answer.footprint_mib) <= len(answer.parts_mib)
    assert msgspec.json.decode(msgspec.json.encode(answer), type=Estimate) == answer
    return answer


def refused(name: str, described: Described | None, *, gpus: int = 1) -> str:
    answer = ask(name, Told(described), gpus=gpus)
    assert isinstance(answer, NoEstimate), answer
    return answer.reason


@pytest.fixture
def deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in with the library's two functions, its arithmetic without offloading, and its chatter on stdout."""
    zero = tmp_path / "deepspeed" / "runtime" / "zero"
    zero.mkdir(parents=True)
    for folder in (zero, zero.parent, zero.parent.parent):
        (folder / "__init__.py").write_text("print('[INFO] Setting ds_accelerator to cpu', end='')\n")
    (zero / "stage_1_and_2.py").write_text(
        "def estimate_zero2_model_states_mem_needs(total_params, num_gpus_per_node=1, num_nodes=1, cpu_offload=True):\n"
        "    assert num_nodes == 1 and not cpu_offload\n"
        "    return 7, 2 * total_params + int(18 * total_params / num_gpus_per_node)\n"
    )
    (zero / "stage3.py").write_text(
        "def estimate_zero3_model_states_mem_needs(total_params, largest_layer_params, num_gpus_per_node=1,\n"
        "        num_nodes=1, cpu_offload=True, cpu_offload_params=True):\n"
        "    assert num_nodes == 1 and not cpu_offload and not cpu_offload_params\n"
        "    return 7, 4 * largest_layer_params + int(18 * total_params / num_gpus_per_node), 9\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    return zero


@pytest.mark.parametrize("name", NAMES)
def test_each_is_registered_and_refuses_in_its_own_name(name: str, deepspeed: Path) -> None:
    assert deepspeed.is_dir()
    reason = refused(name, None)
    assert "python made no step" in reason
    answer = ask(name, NoTrials())
    assert isinstance(answer, NoEstimate)
    assert answer.reason == NoTrials.reason


def resnet50(batch: int) -> str:
    """The torchsummary table of torchvision's ResNet-50 at 224 × 224, from its architecture."""
    rows: list[tuple[str, Sequence[int], int]] = []

    def convolve(taken: int, given: int, size: int, kernel: int, *, relu: bool) -> None:
        rows.append(("Conv2d", (given, size, size), taken * given * kernel * kernel))
        rows.append(("BatchNorm2d", (given, size, size), 2 * given))
        rows.extend([("ReLU", (given, size, size), 0)] if relu else [])

    convolve(3, 64, 112, 7, relu=True)
    rows.append(("MaxPool2d", (64, 56, 56), 0))
    taken, size = 64, 56
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            before, size = size, size // 2 if block == 0 and width > 64 else size
            convolve(taken, width, before, 1, relu=True)
            convolve(width, width, size, 3, relu=True)
            convolve(width, 4 * width, size, 1, relu=False)
            if block == 0:
                convolve(taken, 4 * width, size, 1, relu=False)
            taken = 4 * width
            rows.extend([("ReLU", (taken, size, size), 0), ("Bottleneck", (taken, size, size), 0)])
    rows += [("AdaptiveAvgPool2d", (2048, 1, 1), 0), ("Linear", (1000,), 2_049_000)]
    lines = [f"{kind}-{place}  {[batch, *shape]}  {count:,}" for place, (kind, shape, count) in enumerate(rows, 1)]
    rule = "=" * 64
    return "\n".join(["Layer (type)  Output Shape  Param #", rule, *lines, rule, "Total params: 25,557,032"])


@pytest.mark.parametrize(("batch", "published_mib"), [(32, 7_904), (128, 28_923)])
def test_horus_gives_the_published_figures_of_resnet50(batch: int, published_mib: int) -> None:
    assert answered("horus", read_text(resnet50(batch)).described).footprint_mib == published_mib


def test_horus_needs_a_batch_and_outputs() -> None:
    assert "batch" in refused("horus", read_text(resnet50(-1)).described)
    printed = read_text("Net(\n  (0): Linear(in_features=10, out_features=20, bias=True)\n)", batch=4).described
    assert "print(model)" in refused("horus", printed)
    assert "print(model)" in refused("dnnmem", printed)


def test_a_table_that_stops_above_the_layers_has_a_gap() -> None:
    block = Layer(kind="Sequential", output=(2, 8), parameters=100)
    cut = answered("horus", Described(layers=(block,), batch=2, parameters=100))
    assert any("stops above" in warning for warning in cut.warnings)
    whole = answered("horus", read_text(resnet50(2)).described)
    assert not any("stops above" in warning for warning in whole.warnings)


def trial(*events: tuple[int, int, int], steps: int = 3, reason: str = "") -> Trial:
    """Events as (kind, id or mark, MiB)."""
    marks = ("forward", "backward", "step")
    rows = [
        TrialEvent(kind, 0, 0, what if kind == MARK else 0, 0 if kind == MARK else what, mib * MIB)
        for kind, what, mib in events
    ]
    stop = "error" if reason else "steps"
    report = msgspec.convert(
        {"format": FORMAT, "stop": stop, "reason": reason, "steps": steps, "marks": marks}, type=TrialReport
    )
    return Trial(report=report, events=write_events(rows), seconds=1.0)


def test_fake_tensor_is_the_peak_of_what_the_first_pass_makes() -> None:
    told = trial(
        (ALLOC, 1, 900),  # the weights: there before
        (MARK, 0, 0),
        (ALLOC, 2, 100),
        (ALLOC, 3, 50),
        (FREE, 2, 100),
        (FREE, 1, 900),  # not made in the pass, so not taken off
        (MARK, 0, 0),  # a second forward pass before the step belongs to it
        (ALLOC, 4, 80),
        (MARK, 1, 0),
        (ALLOC, 5, 40),
        (MARK, 2, 0),
        (ALLOC, 6, 5_000),  # the optimizer's state
    )
    answer = ask("fake-tensor", Told(trial=told))
    assert isinstance(answer, Estimate)
    assert (answer.footprint_mib, answer.upper_mib, answer.steps_seen) == (170, 170, 3)
    assert "weights" in answer.warnings[0]


def test_fake_tensor_without_a_step_refuses_with_the_trials_reason() -> None:
    cut = trial((MARK, 0, 0), (ALLOC, 1, 10), steps=0, reason="the script raised KeyError")
    assert ask("fake-tensor", Told(trial=cut)) == NoEstimate(source="fake-tensor", reason="the script raised KeyError")
    silent = ask("fake-tensor", Told(trial=trial((MARK, 0, 0), (ALLOC, 1, 10), steps=0)))
    assert isinstance(silent, NoEstimate)
    assert "no optimizer step" in silent.reason


# Sizes of whole segments, so that the allocator adds nothing: 4 MiB values are 16 MiB.
CHAIN = Described(
    layers=(
        Layer(name="a", kind="Linear", output=(16, 1 << 18), parameters=4 * MIB),
        Layer(name="b", kind="ReLU", output=(16, 1 << 18), inplace=True),
        Layer(name="c", kind="Linear", output=(16, 1 << 18), parameters=4 * MIB),
    ),
    batch=16,
    parameters=8 * MIB,
    input=(16, 1 << 18),
    optimizer="Adam",
)


def test_dnnmem_traverses_the_chain() -> None:
    """Weights 32, gradients 32, Adam 64. In the second step: the data 16, two outputs 32, and at c's backward pass the
    gradients of its output and of its input, 32. The in-place layer makes nothing."""
    answer = answered("dnnmem", CHAIN)
    parts = answer.parts_mib
    assert (parts["weights"], parts["gradients"], parts["optimizer"]) == (32, 32, 64)
    assert parts["activations"] == 16 + 32 + 32
    assert answer.reserved_mib == 32 + 32 + 64 + 80 + parts["fragmentation"]
    assert answer.footprint_mib == answer.reserved_mib + CONTEXT_MIB


def test_dnnmem_keeps_what_is_not_in_place_and_knows_optimizers() -> None:
    layers = (CHAIN.layers[0], msgspec.structs.replace(CHAIN.layers[1], inplace=False), CHAIN.layers[2])
    more = answered("dnnmem", msgspec.structs.replace(CHAIN, layers=layers))
    assert more.parts_mib["activations"] == answered("dnnmem", CHAIN).parts_mib["activations"] + 16
    momentum = answered("dnnmem", msgspec.structs.replace(CHAIN, optimizer="SGD", optimizer_slots=1))
    assert momentum.parts_mib["optimizer"] == 32
    unknown = answered("dnnmem", msgspec.structs.replace(CHAIN, optimizer=""))
    assert unknown.parts_mib["optimizer"] == 0
    assert any("optimizer is not known" in warning for warning in unknown.warnings)


def test_dnnmem_makes_no_gradient_of_the_data() -> None:
    layer = Layer(kind="Linear", output=(1, 1), parameters=10, inputs=((16, 1 << 20),))
    described = Described(layers=(layer,), batch=16, parameters=10, input=(16, 1 << 20))
    assert answered("dnnmem", described).reserved_mib == 64 + 2


def test_dnnmem_rounds_as_the_framework_does() -> None:
    """A tensor of 40 B takes a segment of 2 MiB, one of 1 MiB + 4 B a segment of 20 MiB."""
    small = Described(layers=(Layer(kind="Linear", output=(1, 1), parameters=10),), batch=1, parameters=10)
    assert answered("dnnmem", small).reserved_mib == 2
    layer = Layer(kind="Linear", output=(1, 1), parameters=MIB // 4 + 1)
    large = Described(layers=(layer,), batch=1, parameters=layer.parameters)
    assert answered("dnnmem", large).reserved_mib == 22


def test_dnnmem_adds_the_workspace_of_a_convolution() -> None:
    """One sample unfolded: 64 channels × 9 × 128 × 128 values are 36 MiB, at the peak or above what the cache holds."""
    attributes = {"kernel_size": "(3, 3)", "in_channels": "64", "groups": "1"}
    layer = Layer(kind="Conv2d", output=(1, 64, 128, 128), parameters=36_864, attributes=attributes)
    with_it = answered("dnnmem", Described(layers=(layer,), batch=1, parameters=36_864))
    pointwise = msgspec.structs.replace(layer, attributes=attributes | {"kernel_size": "(1, 1)"})
    without = answered("dnnmem", Described(layers=(pointwise,), batch=1, parameters=36_864))
    assert with_it.footprint_mib - without.footprint_mib == 36
    grouped = msgspec.structs.replace(layer, attributes=attributes | {"groups": "2"})
    assert answered("dnnmem", Described(layers=(grouped,), batch=1, parameters=36_864)).footprint_mib < (
        with_it.footprint_mib
    )


def test_dnnmem_counts_tied_weights_once_and_blocks_output_never() -> None:
    tied = msgspec.structs.replace(CHAIN, parameters=4 * MIB)
    assert answered("dnnmem", tied).parts_mib["weights"] == 16
    block = Layer(name="net", kind="Block", output=(16, 1 << 18), parameters=4 * MIB)
    inner = tuple(msgspec.structs.replace(layer, name=f"net.{layer.name}") for layer in CHAIN.layers)
    nested = msgspec.structs.replace(CHAIN, layers=(block, *inner), parameters=12 * MIB)
    answer = answered("dnnmem", nested)
    assert answer.parts_mib["weights"] == 48
    assert answer.parts_mib["activations"] == answered("dnnmem", CHAIN).parts_mib["activations"]


DECODER = Described(
    layers=(
        Layer(name="wte", kind="Embedding", parameters=32 * MIB),
        Layer(name="c_attn", kind="Conv1D", parameters=4 * MIB),
        Layer(name="ln", kind="LayerNorm", parameters=1024),
        Layer(name="lm_head", kind="Linear", parameters=8 * MIB),
    ),
    batch=8,
    parameters=40 * MIB,
    input=(8, 1024),
    autocast="float16",
    checkpointing=True,
    config={"model_type": "gpt2", "n_embd": "512", "n_layer": "6", "vocab_size": "131072"},
)


def test_llmem_sums_chunks_moments_outputs_and_logits() -> None:
    """Chunks of 32 Mi values, so 64 Mi: 128 MiB in half and 256 MiB in full precision, 16 MiB for the head. Moments of
    the others: 2 × 4 × 36 Mi. Outputs: (6 + 2) × 8 MiB. Logits: 2 MiB for each
    of 1024 places, and twice for 1023."""
    answer = answered("llmem", DECODER)
    assert answer.parts_mib == {
        "weights": 128 + 16,
        "float32 weights": 256,
        "optimizer": 288,
        "input": 2,
        "activations": 64,
        "logits": 2048 + 2 * 2046,
        "context": CONTEXT_MIB,
    }
    assert len(answer.warnings) == 1


def test_llmem_takes_batch_and_length_from_the_first_embedding_if_the_input_is_unknown() -> None:
    words = msgspec.structs.replace(DECODER.layers[0], output=(8, 1024, 512))
    unseen = msgspec.structs.replace(DECODER, input=(), layers=(words, *DECODER.layers[1:]))
    assert answered("llmem", unseen).parts_mib == answered("llmem", DECODER).parts_mib


def test_llmem_warns_if_the_script_differs_from_its_set_up() -> None:
    plain = msgspec.structs.replace(DECODER, checkpointing=False, autocast="")
    warnings = " ".join(answered("llmem", plain).warnings)
    assert "checkpointing" in warnings
    assert "float32" in warnings


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"config": {}}, "nothing here names one (no summary does)"),
        ({"config": DECODER.config | {"model_type": "bert"}}, "type bert"),
        ({"config": DECODER.config | {"vocab_size": "many"}}, "vocabulary"),
        ({"input": (8,)}, "length"),
    ],
)
def test_llmem_refuses_what_it_is_not_for(change: dict[str, object], told: str) -> None:
    assert told in refused("llmem", msgspec.structs.replace(DECODER, **change))


def test_llmem_is_for_one_gpu() -> None:
    assert "several GPUs" in refused("llmem", DECODER, gpus=2)


def test_zero_asks_the_library(deepspeed: Path) -> None:
    assert deepspeed.is_dir()
    assert answered("zero2", DECODER).footprint_mib == 40 * 20
    assert answered("zero2", DECODER, gpus=2).footprint_mib == 40 * (2 + 9)
    assert answered("zero3", DECODER).footprint_mib == 40 * 18 + 32 * 4
    assert answered("zero3", DECODER, gpus=4).footprint_mib == 40 * 18 // 4 + 32 * 4


@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_zero_without_the_library_has_a_hint_how_to_install_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    assert "pip install deepspeed" in refused(name, DECODER)


def test_zero_with_a_broken_library_refuses(deepspeed: Path) -> None:
    (deepspeed / "stage3.py").write_text("raise ImportError('no module named torch')\n")
    assert refused("zero3", DECODER) == "DeepSpeed cannot be used: ImportError: no module named torch"


@pytest.mark.parametrize(
    ("dtype", "autocast", "mib"), [("float32", "", 640), ("float32", "bfloat16", 320), ("float16", "", 320)]
)
def test_accelerate_is_four_times_the_weights_or_two_in_half_precision(dtype: str, autocast: str, mib: int) -> None:
    described = Described(layers=(), parameters=40 * MIB, dtype=dtype, autocast=autocast)
    assert answered("accelerate", described).footprint_mib == mib


def test_accelerate_has_no_rule_for_other_types() -> None:
    assert "float64" in refused("accelerate", Described(layers=(), parameters=8, dtype="float64"))


def test_a_model_without_parameters_has_no_figure() -> None:
    assert "no memory" in refused("accelerate", Described(layers=(), parameters=0))
