"""Models as files: onnxruntime says what torch says, for one model as for many, and the facts beside them are true."""

from __future__ import annotations

import logging
import warnings
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from gpumemnet.serving.features import FEATURES, PLACE
from gpumemnet.serving.merged_layers import Merged, merge
from gpumemnet.serving.model import runtime
from gpumemnet.serving.model_facts import read_facts
from gpumemnet.training import learners
from gpumemnet.training import shipped_models as make
from gpumemnet.training.accuracy_report import Entry, Judged
from gpumemnet.training.ensemble import Fit, Learned, learn
from gpumemnet.training.export import export, hushed, module_of
from gpumemnet.training.learners import Learner, fit_attention, fit_dense
from gpumemnet.training.samples import Numbers, Samples
from gpumemnet.training.scores import judge
from gpumemnet.training.target_scale import QUANTILES
from gpumemnet.training.trees import fit_forests
from gpumemnet_fixtures.layer_lists import unmerged
from gpumemnet_fixtures.training_data import made, threads_as_they_were  # noqa: F401

SHORT: dict[str, Fit] = {
    "mlp-based": partial(fit_dense, rounds=3),
    "transformer-based": partial(fit_attention, rounds=1),
}


@pytest.fixture(scope="module")
def samples() -> Samples:
    return made(90)


def run(path: Path, fed: dict[str, np.ndarray]) -> Numbers:
    session = runtime().InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found: Numbers = session.run(["quantiles"], fed)[0]
    return found


def layers_fed(samples: Samples, row: int, layers: Merged) -> dict[str, np.ndarray]:
    fed = {"kinds": layers.kinds, "tokens": layers.tokens, "weights": layers.weights, "scalars": samples.scalars[row]}
    return {name: value[None] for name, value in fed.items()}


def test_the_mlp_based_model_says_the_same_in_onnxruntime(samples: Samples, tmp_path: Path) -> None:
    learned = learn(SHORT["mlp-based"], samples, 3, 0, 1)
    (tmp_path / "m.onnx").write_bytes(export(learned))
    truth = learned.quantiles_mib(samples)
    for rows in (1, 2, len(samples)):
        found = run(tmp_path / "m.onnx", {"scalars": samples.scalars[:rows]})
        assert found.shape == (rows, len(QUANTILES))
        np.testing.assert_allclose(found, truth[:rows], rtol=1e-4)
    assert (np.diff(truth, axis=1) >= 0).all()
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]  # weights are in it


def test_the_transformer_based_model_says_the_same_in_onnxruntime(samples: Samples, tmp_path: Path) -> None:
    learned = learn(SHORT["transformer-based"], samples, 2, 0, 1)
    (tmp_path / "t.onnx").write_bytes(export(learned))
    truth = learned.quantiles_mib(samples)
    for row in range(0, len(samples), 10):
        for form in (merge, unmerged):
            layers = form(samples.kinds[row], samples.tokens[row])
            found = run(tmp_path / "t.onnx", layers_fed(samples, row, layers))
            np.testing.assert_allclose(found[0], truth[row], rtol=1e-4)


def test_trees_have_no_file(samples: Samples) -> None:
    learned = learn(fit_forests, samples, 2, 0, 1)
    with pytest.raises(TypeError, match="Forests"):
        module_of(learned)


@pytest.mark.parametrize(("learner", "name"), [("mlp-based", "mlp-mlp"), ("transformer-based", "mlp-transformer")])
def test_facts_stand_beside_the_model(
    learner: str, name: str, samples: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make, "LEARNERS", {learner: Learner(SHORT[learner], 2, 2)})
    path = make.make(samples, learner, tmp_path, seed=4)
    assert path == tmp_path / f"{name}.onnx"
    assert path.stat().st_size < 1_000_000
    assert str(Path(make.__file__).parent).encode() not in path.read_bytes()  # no paths of the machine that made it
    facts = read_facts(tmp_path / f"{name}.json")
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


def test_the_same_seed_gives_the_same_file(samples: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "LEARNERS", {"mlp-based": Learner(SHORT["mlp-based"], 2, 2)})
    one, two = (make.make(samples, "mlp-based", tmp_path / name, seed=0) for name in "ab")
    fed = {"scalars": samples.scalars}
    np.testing.assert_array_equal(run(one, fed), run(two, fed))
    assert one.with_suffix(".json").read_bytes() == two.with_suffix(".json").read_bytes()


def test_bounds_of_the_facts_hold_on_rows_that_each_member_left_out(samples: Samples) -> None:
    learned: Learned = learn(SHORT["mlp-based"], samples, 3, 0, 1)
    for level, factor in learned.factors.items():
        bound = learned.unseen_mib[:, QUANTILES.index(level)] * factor
        # A factor is the ratio of one of the rows, which its product may miss by the last digit.
        assert (samples.footprint_mib <= bound * (1 + 1e-9)).mean() >= level


def test_scores_are_those_of_the_folds_where_there_are_some() -> None:
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


def test_the_exporter_talks_to_itself(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("torch.onnx")
    with hushed():
        log.warning("torchvision is not installed")
        warnings.warn("deprecated", stacklevel=1)
        log.error("it broke")
    log.warning("heard again")
    assert [record.message for record in caplog.records] == ["it broke", "heard again"]
