"""Models as files: onnxruntime gives the same quantiles as torch, and the facts beside the models are true."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from gpumemnet.serving.features import FEATURES, PLACE
from gpumemnet.serving.model import Merged, merge, runtime
from gpumemnet.serving.model_facts import Facts, read_facts
from gpumemnet.training.accuracy_report import Entry, Judged
from gpumemnet.training.ensemble import Fit, Learned, Separate, learn
from gpumemnet.training.samples import QUANTILES, Numbers, Samples
from gpumemnet.training.scores import judge
from gpumemnet_fixtures.layer_lists import unmerged
from gpumemnet_fixtures.training_data import made, threads_as_they_were  # noqa: F401


def few_rounds() -> dict[str, Fit]:
    from gpumemnet.training.learners import fit_attention, fit_dense

    return {"mlp-based": partial(fit_dense, rounds=3), "transformer-based": partial(fit_attention, rounds=1)}


@pytest.fixture(scope="module")
def samples() -> Samples:
    return made(90)


@dataclass(frozen=True)
class Exported:
    """A model's files in a directory of their own, and the learned model that they were written from."""

    file: Path
    learned: Learned
    facts: Facts


def exported(samples: Samples, learner: str, folder: Path, seed: int = 4) -> Exported:
    from gpumemnet.training import shipped_models as make
    from gpumemnet.training.learners import Learner

    found: list[Learned] = []

    def noted(*arguments: Any) -> Learned:
        found.append(learn(*arguments))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make, "LEARNERS", {learner: Learner(few_rounds()[learner], 2, 2)})
        patch.setattr(make, "learn", noted)
        file = make.make(samples, learner, folder, seed=seed)
    return Exported(file, found[0], read_facts(file.with_suffix(".json")))


@pytest.fixture(scope="module")
def mlp_based(samples: Samples, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return exported(samples, "mlp-based", tmp_path_factory.mktemp("mlp"))


@pytest.fixture(scope="module")
def transformer_based(samples: Samples, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return exported(samples, "transformer-based", tmp_path_factory.mktemp("transformer"))


def run(path: Path, fed: dict[str, np.ndarray]) -> Numbers:
    session = runtime().InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found: Numbers = session.run(["quantiles"], fed)[0]
    return found


def layers_fed(samples: Samples, row: int, layers: Merged) -> dict[str, np.ndarray]:
    fed = {"kinds": layers.kinds, "tokens": layers.tokens, "weights": layers.weights, "scalars": samples.scalars[row]}
    return {name: value[None] for name, value in fed.items()}


def test_the_mlp_based_model_gives_the_same_quantiles_in_onnxruntime(samples: Samples, mlp_based: Exported) -> None:
    truth = mlp_based.learned.quantiles_mib(samples)
    for rows in (1, 2, len(samples)):
        found = run(mlp_based.file, {"scalars": samples.scalars[:rows]})
        assert found.shape == (rows, len(QUANTILES))
        np.testing.assert_allclose(found, truth[:rows], rtol=1e-4)
    assert (np.diff(truth, axis=1) >= 0).all()
    assert sorted(path.suffix for path in mlp_based.file.parent.iterdir()) == [".json", ".onnx"]  # no file of weights


def test_the_transformer_based_model_gives_the_same_quantiles_in_onnxruntime(
    samples: Samples, transformer_based: Exported
) -> None:
    truth = transformer_based.learned.quantiles_mib(samples)
    for row in range(0, len(samples), 10):
        for form in (merge, unmerged):
            layers = form(samples.kinds[row], samples.tokens[row])
            found = run(transformer_based.file, layers_fed(samples, row, layers))
            np.testing.assert_allclose(found[0], truth[row], rtol=1e-4)


def test_trees_have_no_file(mlp_based: Exported) -> None:
    from gpumemnet.training.export import module_of

    learned = type(mlp_based.learned)(**{**vars(mlp_based.learned), "members": Separate([], lambda *_: np.zeros(0))})
    with pytest.raises(TypeError, match="Separate"):
        module_of(learned)


@pytest.mark.parametrize(("learner", "name"), [("mlp_based", "mlp-mlp"), ("transformer_based", "mlp-transformer")])
def test_facts_are_written_beside_the_model(
    learner: str, name: str, samples: Samples, request: pytest.FixtureRequest
) -> None:
    from gpumemnet.training import shipped_models as make

    written: Exported = request.getfixturevalue(learner)
    path, facts = written.file, written.facts
    assert path.name == f"{name}.onnx"
    assert path.stat().st_size < 1_000_000
    assert str(Path(make.__file__).parent).encode() not in path.read_bytes()  # no paths of the machine that made it
    assert (facts.name, facts.family, facts.class_widths_gb) == (name, "mlp", (1, 2))
    assert facts.quantiles == QUANTILES
    assert list(facts.ranges) == list(FEATURES)
    assert facts.ranges["batch"] == (samples.scalars[:, PLACE["batch"]].min(), samples.scalars[:, PLACE["batch"]].max())
    assert facts.kinds_seen == {"linear": 90, "activation": 90, "rectifier": 74}
    assert facts.most_layers == samples.layer_counts.max()
    assert (facts.learned.rows, facts.learned.gpu, facts.learned.seed) == (len(samples), "NVIDIA H200", 4)
    assert facts.learned.data_sha256 == {"made": "0" * 64}
    assert sorted(facts.bounds) == ["0.9", "0.95", "0.99"]
    assert all(bound.quantile == float(level) and bound.factor > 0 for level, bound in facts.bounds.items())
    assert sorted(facts.scores) == ["1GB", "2GB"]
    assert 0.5 <= facts.operating_point < 1


def test_the_same_seed_gives_the_same_file(samples: Samples, mlp_based: Exported, tmp_path: Path) -> None:
    again = exported(samples, "mlp-based", tmp_path)
    fed = {"scalars": samples.scalars}
    np.testing.assert_array_equal(run(mlp_based.file, fed), run(again.file, fed))
    assert mlp_based.facts == again.facts


def test_bounds_of_the_facts_hold_on_rows_that_each_member_left_out(samples: Samples) -> None:
    learned: Learned = learn(few_rounds()["mlp-based"], samples, 3, 0, 1)
    for level, factor in learned.factors.items():
        bound = learned.unseen_mib[:, QUANTILES.index(level)] * factor
        # A factor is the ratio of one of the rows, which its product may miss by the last digit.
        assert (samples.footprint_mib <= bound * (1 + 1e-9)).mean() >= level


def test_scores_are_those_of_the_folds_if_there_are_some() -> None:
    from gpumemnet.training import learners
    from gpumemnet.training import shipped_models as make

    classes = judge(np.array([0, 1, 1]), np.array([0, 1, 0]), 1, merged=False)
    judged = Judged(point="operating", classes=classes, of_split={})
    about = {"data": "mlp", "family": "mlp", "learner": "mlp-based", "protocol": "folds", "rows": 3, "errors": None}
    rest = {"coverage": {}, "bounds": (), "curves": {}, "took_s": 0.0}
    entry = msgspec.convert({**about, **rest, "judged": [msgspec.to_builtins(judged)]}, Entry)
    found = make.scores_of([entry], "mlp", "mlp-based")
    assert found is not None
    assert found["1GB"]["under"] == pytest.approx(1 / 3)
    assert make.scores_of([entry], "cnn", "mlp-based") is None
    assert set(learners.LEARNERS) >= {"mlp-based", "transformer-based"}


def test_warnings_of_the_exporter_are_hidden_and_errors_are_not(caplog: pytest.LogCaptureFixture) -> None:
    from gpumemnet.training.export import hushed

    log = logging.getLogger("torch.onnx")
    with hushed():
        log.warning("torchvision is not installed")
        warnings.warn("deprecated", stacklevel=1)
        log.error("it broke")
    log.warning("heard again")
    assert [record.message for record in caplog.records] == ["it broke", "heard again"]
