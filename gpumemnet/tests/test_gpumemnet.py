"""GPUMemNet as it is served: real onnxruntime runs of models whose figures are worked out by hand."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from carma.core.model.settings import Memory, Rules
from carma.core.model.values import Estimate, Gpu, GpuId, NoEstimate, Owner, TaskId, TaskSpec
from carma.core.ports import EstimateRequest
from carma.errors import PluginError
from carma.paths import find_paths
from carma.store.memory import MemoryStore
from carma.trial import protocol
from carma.trial.layers.description import Described, Layer
from carma.trial.protocol import NoTrials
from carma.trial.replay import card_constants as constants
from carma.trial.replay.card_constants import CardConstants, ContextReading
from gpumemnet.serving import estimator
from gpumemnet.serving import model as models
from gpumemnet.serving.estimator import GpuMemNet, class_of
from gpumemnet.serving.features import PLACE, TOKEN, features
from gpumemnet.serving.model_facts import Bound, Facts, Kind, read_facts
from gpumemnet_fixtures import gpumemnet_models as tiny

MIB = 1 << 20
CARDS = (constants.SHIPPED,)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for family in ("mlp", "cnn"):
        for kind in ("mlp", "transformer"):
            tiny.save(tmp_path / "models", tiny.facts(family, kind))
    return tmp_path / "models"


def served(folder: Path, kind: Kind = "mlp", level: float = 0.99, cards: tuple[Path, ...] = CARDS) -> GpuMemNet:
    return GpuMemNet(kind, NoTrials(), level, models=(folder,), cards=cards)


def answered(folder: Path, described: Described, kind: Kind = "mlp", *, gpu: str = "", gpus: int = 1) -> Estimate:
    answer = served(folder, kind).of(described, gpu, gpus)
    assert isinstance(answer, Estimate), answer
    return answer


def guess_mib(described: Described) -> float:
    return float(2.0 ** features(described).scalars[PLACE["guess_mib"]]) - 1.0


def test_the_median_is_the_footprint_and_a_quantile_times_its_factor_the_bound(folder: Path) -> None:
    guess = guess_mib(tiny.perceptron(batch=4096))
    assert guess > 40
    answer = answered(folder, tiny.perceptron(batch=4096))
    assert answer.footprint_mib == pytest.approx(600 + guess, abs=1)
    assert answer.upper_mib == pytest.approx(1.5 * (600 + 1.2 * guess), abs=1)
    assert answer.level == 0.99
    assert answer.source == "gpumemnet"
    assert answer.gpu_model == "NVIDIA H200"


def test_the_transformer_based_one_sees_every_layer(folder: Path) -> None:
    small, large = tiny.perceptron(batch=4096, depth=1), tiny.perceptron(batch=4096, depth=3)
    one, three = answered(folder, small, "transformer"), answered(folder, large, "transformer")
    assert one.source == "gpumemnet-transformer"
    # 4,096 × 1,024 × 4 bytes, twice; one is linear, and a rectifier follows it.
    assert one.footprint_mib == pytest.approx(600 + 2 * 16 + 100 + 10, abs=1)
    assert three.footprint_mib - one.footprint_mib == pytest.approx(2 * (32 + 100 + 10), abs=1)


def test_equal_layers_are_fed_once_with_their_weight() -> None:
    fed = models._fed(features(tiny.perceptron(depth=50)), "transformer")
    # Only the first keeps the input; the first two and the last have other neighbours than the rest.
    assert sorted(fed["weights"][0].tolist()) == [1, 1, 1, 48, 49]
    assert fed["kinds"].shape == (1, 5, 3)
    assert fed["tokens"].shape == (1, 5, 3, len(TOKEN))


@pytest.mark.parametrize(("wanted", "given", "factor"), [(0.5, 0.9, 1.0), (0.9, 0.9, 1.0), (0.95, 0.99, 1.5)])
def test_a_bound_holds_at_least_as_often_as_was_asked(folder: Path, wanted: float, given: float, factor: float) -> None:
    described = tiny.perceptron(batch=4096)
    answer = served(folder, level=wanted).of(described)
    assert isinstance(answer, Estimate)
    assert answer.level == given
    assert answer.upper_mib == pytest.approx(factor * (600 + 1.2 * guess_mib(described)), abs=1)
    assert not any("bound" in warning for warning in answer.warnings[:-1])  # the last names the model


def test_a_level_that_was_not_learned_is_not_promised(folder: Path) -> None:
    answer = served(folder, level=0.999).of(tiny.perceptron())
    assert isinstance(answer, Estimate)
    assert answer.level == 0.99
    assert "the bound is for 99 %: no higher one was learned" in answer.warnings


def test_without_learned_bounds_there_is_no_level(tmp_path: Path) -> None:
    tiny.save(tmp_path, tiny.facts(bounds={}))
    answer = answered(tmp_path, tiny.perceptron(batch=4096))
    assert answer.level is None
    assert answer.upper_mib == pytest.approx(600 + 1.2 * guess_mib(tiny.perceptron(batch=4096)), abs=1)


def test_a_bound_is_never_below_the_footprint(tmp_path: Path) -> None:
    tiny.save(tmp_path, tiny.facts(bounds={"0.99": Bound(quantile=0.1, factor=0.5)}))
    answer = answered(tmp_path, tiny.perceptron(batch=4096))
    assert answer.upper_mib == answer.footprint_mib


@pytest.mark.parametrize(
    ("mib", "width", "number"), [(999.9, 1, 0), (1000.0, 1, 1), (15_999.0, 8, 1), (16_000.0, 8, 2)]
)
def test_a_class_holds_its_lower_edge_and_not_its_upper_one(mib: float, width: int, number: int) -> None:
    facts = tiny.facts(class_widths_gb=(width,))
    assert class_of(facts, mib) == number


def test_a_class_above_that_of_the_footprint_is_a_warning(folder: Path) -> None:
    told = ("it may well lie in the class above: 1–2 GB (of 1,000 MiB)",)
    assert estimator.class_above(tiny.facts(), (0.0, 900.0, 1300.0)) == told  # 0.7 lies half way: 1,100 MiB
    assert estimator.class_above(tiny.facts(operating_point=0.5), (0.0, 900.0, 1300.0)) == ()
    assert estimator.class_above(tiny.facts(), (0.0, 1100.0, 1300.0)) == ()
    tiny.save(folder, tiny.facts(class_widths_gb=(1,), operating_point=0.9))
    described = tiny.perceptron(batch=8192, depth=100)
    quantiles = [600 + factor * guess_mib(described) for factor in tiny.FACTORS]
    assert class_of(tiny.facts(), quantiles[2]) > class_of(tiny.facts(), quantiles[1])
    assert any("the class above" in warning for warning in answered(folder, described).warnings)


def test_parts_add_up_to_the_footprint(folder: Path) -> None:
    answer = answered(folder, tiny.perceptron(batch=8192, depth=4), gpus=2)
    assert sum(answer.parts_mib.values()) == answer.footprint_mib
    assert answer.parts_mib["weights"] == 16
    assert answer.parts_mib["optimizer_state"] == 32
    assert answer.parts_mib["context"] == 600
    # Not "activations" as of a trial run, which tells workspaces and fragmentation apart.
    assert list(answer.parts_mib)[-1] == "activations_and_the_rest"


def test_parts_are_left_out_where_arithmetic_finds_more_than_there_is(folder: Path) -> None:
    frozen = tiny.perceptron(parameters=10**9)
    answer = served(folder, "transformer").of(frozen)
    assert isinstance(answer, Estimate)
    assert answer.parts_mib == {}


def test_another_gpu_is_a_warning_and_its_context_is_added(tmp_path: Path, folder: Path) -> None:
    cards = tmp_path / "cards"
    for gpu, start in (("NVIDIA H200", 600), ("Tesla T4", 350)):
        readings = (
            ContextReading(after="init", outside_bytes=start * MIB),
            ContextReading(after="matmul_fp32", outside_bytes=(start + 50) * MIB),
        )
        card = CardConstants(gpu=gpu, torch="2.11.0", contexts=readings)
        constants.save(card, (), cards / constants.file_name(card))
    described = tiny.perceptron(batch=4096)
    asked = served(folder, cards=(cards,))
    own, other = asked.of(described, "NVIDIA H200"), asked.of(described, "Tesla T4")
    assert isinstance(own, Estimate)
    assert isinstance(other, Estimate)
    assert other.footprint_mib == own.footprint_mib - 250
    assert other.upper_mib == own.upper_mib - 250
    assert other.parts_mib["context"] == own.parts_mib["context"] - 250
    assert other.gpu_model == "Tesla T4"
    assert any("trained on data of NVIDIA H200" in warning and "-250 MiB" in warning for warning in other.warnings)
    assert not any("context that is counted" in warning for warning in other.warnings)
    assert not any("trained on data of" in warning for warning in own.warnings)


def test_an_unmeasured_gpus_context_is_named_with_the_gpu_it_comes_from(folder: Path) -> None:
    for gpu in ("NVIDIA GeForce RTX 4090", "NVIDIA A100-SXM4-40GB"):
        other = answered(folder, tiny.perceptron(), gpu=gpu)
        said = next(warning for warning in other.warnings if "trained on data of" in warning)
        assert "the context that is counted is that of NVIDIA H200" in said
        assert other.parts_mib["context"] == answered(folder, tiny.perceptron()).parts_mib["context"]


def test_a_build_of_the_same_card_is_the_same_card(folder: Path) -> None:
    assert not any(
        "trained on data of" in each for each in answered(folder, tiny.perceptron(), gpu="NVIDIA H200 NVL").warnings
    )


def test_several_gpus_add_buckets_and_nccl(folder: Path) -> None:
    described = tiny.perceptron(batch=4096, depth=4)
    alone, two = answered(folder, described), answered(folder, described, gpus=2)
    assert two.footprint_mib == alone.footprint_mib + 16 + 544
    assert any("560 MiB are added" in warning for warning in two.warnings)


def test_threads_share_one_session(folder: Path) -> None:
    gate, found = threading.Barrier(4), []

    def ask() -> None:
        gate.wait()
        found.append(models.load("cnn", "transformer", "", (folder,)))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len({id(one) for one in found}) == 1


def test_a_family_without_a_model_is_refused(folder: Path) -> None:
    layers = (
        Layer(kind="Embedding", output=(2, 64, 32), parameters=3200),
        Layer(kind="MultiheadAttention", output=(2, 64, 32), parameters=4224),
    )
    answer = served(folder).of(Described(layers=layers, batch=2, input=(2, 64)))
    assert isinstance(answer, NoEstimate)
    assert answer.reason == "no model of transformers has been learned; carma train makes one"


def test_what_a_summary_does_not_tell_is_asked_for(folder: Path) -> None:
    no_batch = served(folder).of(replace(tiny.perceptron(), batch=None))
    assert isinstance(no_batch, NoEstimate)
    assert "--batch" in no_batch.reason


def test_what_no_run_of_the_data_was_like_is_refused(folder: Path) -> None:
    several = served(folder).of(tiny.perceptron(passes=3))
    assert isinstance(several, NoEstimate)
    assert several.reason.startswith("a step holds 3 calls of networks at once, or trains as many networks")
    double = served(folder).of(tiny.perceptron(dtype="float64"))
    assert isinstance(double, NoEstimate)
    assert double.reason == "weights of the type float64 are not in its training data"
    assert isinstance(served(folder).of(tiny.perceptron(passes=1, dtype="bfloat16")), Estimate)


def test_the_first_output_replaces_an_unknown_input(tmp_path: Path) -> None:
    low, high = (float(np.log2(1 + size)) for size in (8 * 1000, 8 * 1100))
    tiny.save(tmp_path, tiny.facts(ranges=tiny.facts().ranges | {"input": (low, high)}))
    known, unknown = tiny.perceptron(), replace(tiny.perceptron(), input=())
    assert not any("the input" in warning for warning in answered(tmp_path, known).warnings)
    answer = answered(tmp_path, unknown)
    assert "the input's size is not known: the first layer's output stands in" in answer.warnings
    assert answer.footprint_mib == answered(tmp_path, known).footprint_mib


def test_of_words_the_number_is_the_input() -> None:
    layers = (Layer(kind="Embedding", output=(2, 64, 32), parameters=3200), Layer(kind="Linear", output=(2, 64, 8)))
    assert estimator.with_input(Described(layers=layers, batch=2))[0].input == (2, 64)
    known = Described(layers=layers, batch=2, input=(2, 65))
    assert estimator.with_input(known) == (known, ())


def test_a_refused_trial_is_refused_under_its_own_name(folder: Path) -> None:
    request = EstimateRequest(
        task=TaskId(1), owner=Owner(1, 1, "alice"), spec=TaskSpec(command=("true",), directory="/"), gpus=()
    )
    answer = served(folder, "transformer").estimate(request)
    assert answer == NoEstimate(source="gpumemnet-transformer", reason="trial runs are switched off")


class Told(NoTrials):
    def __init__(self, described: Described) -> None:
        self._described = described

    def describe(self, request: EstimateRequest) -> Described:  # type: ignore[override]  # noqa: ARG002
        return self._described


def test_a_model_that_does_not_fit_is_a_warning(folder: Path) -> None:
    gpu = Gpu(id=GpuId("GPU-0"), index=0, name="NVIDIA H200", memory_mib=500)
    spec = TaskSpec(command=("python", "train.py"), directory="/")
    request = EstimateRequest(task=TaskId(1), owner=Owner(1, 1, "alice"), spec=spec, gpus=(gpu,))
    answer = GpuMemNet("mlp", Told(tiny.perceptron()), 0.9, models=(folder,), cards=CARDS).estimate(request)
    assert isinstance(answer, Estimate)
    assert answer.warnings[0] == "it does not fit: NVIDIA H200 has 500 MiB"


def test_a_file_that_is_no_model_is_a_refusal(folder: Path) -> None:
    (folder / "mlp-mlp.onnx").write_bytes(b"no graph")
    answer = served(folder).of(tiny.perceptron())
    assert isinstance(answer, NoEstimate)
    assert "cannot be run" in answer.reason


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"features": ("batch", "depth")}, "other features"),
        ({"kinds": ("linear",)}, "other features"),
        ({"format": 99}, "other features"),
        ({"ranges": {"batch": (0.0, 9.0)}}, "the range of each feature"),
        ({"quantiles": (0.1, 0.4, 0.9)}, "the median"),
        ({"quantiles": (0.5, 0.1, 0.9)}, "do not ascend"),
    ],
)
def test_a_model_that_would_be_read_wrongly_is_not_asked(folder: Path, changed: dict[str, object], reason: str) -> None:
    tiny.save(folder, tiny.facts(**changed))  # type: ignore[arg-type]
    answer = served(folder).of(tiny.perceptron())
    assert isinstance(answer, NoEstimate)
    assert reason in answer.reason


def context(level: float = 0.9) -> protocol.Context:
    rules = Rules(memory=Memory(level=level))
    return protocol.Context(archive=MemoryStore(), gpus=(), rules=rules, trials=Told(tiny.perceptron()))


def test_a_users_own_models_are_asked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARMA_HOME", str(tmp_path))
    own = constants.own_folder(find_paths({"CARMA_HOME": str(tmp_path)})).with_name("gpumemnet")
    for kind in ("mlp", "transformer"):
        tiny.save(own, tiny.facts("mlp", kind))
    spec = TaskSpec(command=("python", "train.py"), directory="/")
    request = EstimateRequest(task=TaskId(1), owner=Owner(1, 1, "alice"), spec=spec, gpus=())
    makers: dict[Kind, protocol.Make] = {"mlp": estimator.make, "transformer": estimator.make_transformer}
    for kind, make in makers.items():
        answer = make(context()).estimate(request)
        assert isinstance(answer, Estimate)
        expected = served(own, kind, level=0.9).of(tiny.perceptron())
        assert answer == expected
        assert answer.level == 0.9


def test_without_its_runtime_it_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(PluginError, match="needs onnxruntime") as raised:
        estimator.make(context())
    assert raised.value.hint == "pip install onnxruntime"


def test_facts_are_read_as_they_were_written(folder: Path) -> None:
    assert read_facts(folder / "cnn-mlp.json") == tiny.facts("cnn")
    (folder / "cnn-mlp.json").write_text("{}")
    with pytest.raises(PluginError, match="does not describe"):
        read_facts(folder / "cnn-mlp.json")
    with pytest.raises(PluginError, match="cannot be read"):
        read_facts(folder / "none.json")


def test_facts_find_the_nearest_quantile() -> None:
    facts: Facts = tiny.facts(quantiles=(0.05, 0.5, 0.99))
    assert [facts.place(wanted) for wanted in (0.0, 0.5, 0.95, 0.99)] == [0, 1, 2, 2]


def test_torch_takes_no_part(folder: Path) -> None:
    script = (
        "import sys, pathlib\n"
        "from carma.trial.layers.description import Described, Layer\n"
        "from gpumemnet.serving.estimator import GpuMemNet\n"
        "from carma.trial.protocol import NoTrials\n"
        f"estimator = GpuMemNet('mlp', NoTrials(), 0.99, models=(pathlib.Path({str(folder)!r}),))\n"
        "layers = (Layer(kind='Linear', output=(8, 1024), parameters=1024 * 1025),)\n"
        "answer = estimator.of(Described(layers=layers, batch=8, input=(8, 1024)))\n"
        "print(answer.footprint_mib, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    figure, torch = done.stdout.split()
    assert int(figure) > 600
    assert torch == "False"
