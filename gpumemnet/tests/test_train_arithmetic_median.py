"""The plain arithmetic is the median if the learned quantiles allow it and the result is better."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from gpumemnet.serving.model import runtime
from gpumemnet.training.ensemble import learn, with_arithmetic
from gpumemnet.training.samples import MEDIAN, QUANTILES, Numbers, Samples, Scale, Wholes
from gpumemnet_fixtures.training_data import made, threads_as_they_were  # noqa: F401

ROW = [1_000.0, 2_000.0, 3_000.0, 4_000.0, 5_000.0, 6_000.0, 7_000.0]  # of 5, 25, 50, 75, 90, 95 and 99 %


@pytest.mark.parametrize(
    ("plain_mib", "expected"),
    [
        (3_100.0, [1_000.0, 2_000.0, 3_100.0, 4_000.0, 5_000.0, 6_000.0, 7_000.0]),
        (1_500.0, [1_000.0, 1_500.0, 1_500.0, 4_000.0, 5_000.0, 6_000.0, 7_000.0]),
        (5_500.0, [1_000.0, 2_000.0, 5_500.0, 5_500.0, 5_500.0, 6_000.0, 7_000.0]),
        (900.0, ROW),  # below the range
        (6_500.0, ROW),  # above
    ],
)
def test_the_arithmetic_is_the_median_where_it_can_be(plain_mib: float, expected: list[float]) -> None:
    import torch

    from gpumemnet.training import export

    np.testing.assert_array_equal(with_arithmetic(np.array([ROW]), np.array([plain_mib])), [expected])
    found = export.with_arithmetic(torch.tensor([ROW]), torch.tensor([[plain_mib]]))
    np.testing.assert_array_equal(found.numpy(), np.array([expected], np.float32))


class Blurred:
    """Knows the truth within some noise, and how large the noise is."""

    def __init__(self, z: Numbers, spread: float) -> None:
        self._z, self._spread = z, spread

    def z(self, samples: Samples) -> Numbers:
        rng = np.random.default_rng(1)
        width = self._spread * np.linspace(-2, 3, len(QUANTILES))
        return (self._z + rng.normal(0, self._spread, len(samples)))[None, :, None].repeat(2, 0) + width


def blurred(spread: float, samples: Samples) -> float | None:
    def fit(_samples: Samples, z: Numbers, _rows: Sequence[Wholes], _scale: Scale, _seed: int) -> Blurred:
        return Blurred(z, spread)

    return learn(fit, samples, 2, 0, 1).context_mib


def labelled(footprint_mib: Numbers) -> Samples:
    return Samples(**{**vars(made(400)), "footprint_mib": footprint_mib})


def test_the_arithmetic_is_used_if_it_is_exact_and_learners_are_not() -> None:
    exact = labelled(made(400).guess_mib + 700.0)
    assert blurred(0.3, exact) == pytest.approx(700.0)


def test_the_arithmetic_is_not_used_if_learners_are_better() -> None:
    rng = np.random.default_rng(0)
    wrong = labelled(700.0 + made(400).guess_mib * rng.uniform(0.7, 1.4, 400))
    assert blurred(0.002, wrong) is None


def test_the_exported_model_does_the_same(tmp_path: Path) -> None:
    """With the arithmetic as the median of the first row, as a file; without it, as a module."""
    import torch

    from gpumemnet.training import export
    from gpumemnet.training.learners import fit_dense

    samples = made(60)
    learned = learn(partial(fit_dense, rounds=20), samples, 2, 0, 1)
    bare = type(learned)(**{**vars(learned), "context_mib": None})
    near_mib = float(bare.quantiles_mib(samples)[0, MEDIAN] - samples.guess_mib[0]) + 1.0
    learned = type(learned)(**{**vars(learned), "context_mib": near_mib})
    (tmp_path / "m.onnx").write_bytes(export.export(learned))
    session = runtime().InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    found = session.run(["quantiles"], {"scalars": samples.scalars})[0]
    np.testing.assert_allclose(found, learned.quantiles_mib(samples), rtol=1e-4)
    assert abs(found[0, MEDIAN] - samples.guess_mib[0] - near_mib) < 0.5
    with torch.no_grad():
        plain = export.module_of(bare)(torch.from_numpy(samples.scalars)).numpy()
    np.testing.assert_allclose(plain, bare.quantiles_mib(samples), rtol=1e-4)
    assert abs(plain[0, MEDIAN] - samples.guess_mib[0] - near_mib) >= 0.5
