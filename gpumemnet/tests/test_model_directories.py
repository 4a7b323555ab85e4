"""GPUMemNet: the order of the models: those of the user, of the machine, and those shipped with CARMA."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from carma.core.model.values import Estimate, NoEstimate
from carma.trial.protocol import NoTrials
from carma.trial.replay import card_constants as constants
from gpumemnet.serving import model as models
from gpumemnet.serving.estimator import GpuMemNet
from gpumemnet.serving.model_facts import SHIPPED, Facts
from gpumemnet_fixtures import gpumemnet_models as tiny

CARDS = (constants.SHIPPED,)


def test_a_model_learned_on_the_gpu_takes_precedence(tmp_path: Path) -> None:
    shipped, own = tmp_path / "shipped", tmp_path / "own"
    tiny.save(shipped, tiny.facts())
    learned = replace(tiny.facts().learned, gpu="Tesla T4")
    tiny.save(own, tiny.facts(learned=learned, bounds={}))
    folders = (own, shipped)
    assert models.load("mlp", "mlp", "Tesla T4", folders) is models.load("mlp", "mlp", "", (own,))
    assert models.load("mlp", "mlp", "NVIDIA H200", folders) is models.load("mlp", "mlp", "", (shipped,))
    assert models.load("mlp", "mlp", "NVIDIA L4", folders) is models.load("mlp", "mlp", "", (own,))


def narrow(*, most_batch: int, **changed: object) -> Facts:
    learned = replace(tiny.facts().learned, rows=77)
    ranges = tiny.facts().ranges | {"batch": (1.0, float(np.log2(1 + most_batch)))}
    return replace(tiny.facts(ranges=ranges, learned=learned, bounds={}), **changed)


def test_what_an_own_model_does_not_cover_is_asked_of_the_next(tmp_path: Path) -> None:
    own, shipped = tmp_path / "own", tmp_path / "shipped"
    tiny.save(own, narrow(most_batch=100))
    tiny.save(shipped, tiny.facts())
    served = GpuMemNet("mlp", NoTrials(), 0.99, models=(own, shipped), cards=CARDS)
    covered, other = served.of(tiny.perceptron(batch=64)), served.of(tiny.perceptron(batch=4096))
    assert isinstance(covered, Estimate)
    assert isinstance(other, Estimate)
    assert (covered.level, other.level) == (None, 0.99)
    assert covered.rests_on == f"the model mlp-mlp, learned from 77 runs on NVIDIA H200 (in {own})"
    assert other.rests_on == f"the model mlp-mlp, learned from 10 runs on NVIDIA H200 (in {shipped})"
    assert f"{own / 'mlp-mlp'} does not cover it" in other.warnings
    assert not any("does not cover" in warning for warning in covered.warnings)


def test_where_none_covers_it_the_one_that_lacks_least_refuses(tmp_path: Path) -> None:
    own, shipped = tmp_path / "own", tmp_path / "shipped"
    tiny.save(own, narrow(most_batch=100, most_layers=1))
    tiny.save(shipped, tiny.facts())
    answer = GpuMemNet("mlp", NoTrials(), 0.99, models=(own, shipped), cards=CARDS).of(tiny.perceptron(batch=2**20))
    assert isinstance(answer, NoEstimate)
    assert "(1 to 16,383)" in answer.reason


def test_an_own_model_that_cannot_be_used_is_skipped_with_a_warning(tmp_path: Path) -> None:
    own, shipped = tmp_path / "own", tmp_path / "shipped"
    tiny.save(own, tiny.facts(format=99))
    tiny.save(shipped, tiny.facts())
    answer = GpuMemNet("mlp", NoTrials(), 0.99, models=(own, shipped), cards=CARDS).of(tiny.perceptron())
    assert isinstance(answer, Estimate)
    assert any("other features" in warning for warning in answer.warnings)


def level_of(folder: Path) -> float | None:
    answer = GpuMemNet("mlp", NoTrials(), 0.99, models=(folder,), cards=CARDS).of(tiny.perceptron())
    assert isinstance(answer, Estimate), answer
    return answer.level


def test_a_retrained_model_is_read_again(tmp_path: Path) -> None:
    file = tiny.save(tmp_path, tiny.facts())
    assert level_of(tmp_path) == 0.99
    tiny.save(tmp_path, tiny.facts(bounds={}))
    os.utime(file, ns=(1, 1))
    assert level_of(tmp_path) is None


def test_every_user_has_models_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root as well, whose other files lie in the system's places."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    system = Path("/var/lib/carma/gpumemnet")
    share = Path("/home/ann/.local/share/carma/gpumemnet")
    assert models.folders({"HOME": "/home/ann"}) == (share, system, SHIPPED)
    elsewhere = {"HOME": "/home/ann", "XDG_DATA_HOME": "/data"}
    assert models.folders(elsewhere) == (Path("/data/carma/gpumemnet"), system, SHIPPED)
    assert models.own_folder({"HOME": "/home/ann", "XDG_DATA_HOME": "data"}) == share  # relative: to be ignored
    assert models.own_folder({"CARMA_HOME": "/srv/c"}) == Path("/srv/c/gpumemnet")


def test_a_shipped_model_is_named_as_such() -> None:
    answer = GpuMemNet("mlp", NoTrials(), 0.99).of(tiny.perceptron(batch=4096))
    assert isinstance(answer, Estimate)
    assert answer.rests_on.startswith("the model mlp-mlp, learned from ")
    assert answer.rests_on.endswith("(comes with CARMA)")
