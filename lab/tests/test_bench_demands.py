"""What real models keep busy is measured with a description as a trial run gives it: the part that needs no GPU."""

from __future__ import annotations

import json
import sys

import msgspec
import pytest

from carma.trial.layers.description import Described
from carma_lab.bench.gpu import demands

torch = pytest.importorskip("torch")


@pytest.fixture
def describer(monkeypatch: pytest.MonkeyPatch) -> demands.Describer:
    functional = torch.nn.functional
    monkeypatch.setattr(functional, "scaled_dot_product_attention", functional.scaled_dot_product_attention)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return demands.Describer()


def hooks() -> int:
    modules = torch.nn.modules.module
    return len(modules._global_forward_hooks) + len(modules._global_forward_pre_hooks)


def test_a_step_is_described_with_its_optimizer_and_leaves_no_hooks(describer: demands.Describer) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    before = hooks()

    def step() -> None:
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()

    for _ in range(2):
        found = msgspec.convert(describer.describe(step), Described, strict=False)
        assert [layer.kind for layer in found.layers] == ["Linear", "ReLU", "Linear"]
        assert (found.batch, found.optimizer, found.optimizer_slots, found.attention) == (3, "AdamW", 2, "")
    assert hooks() == before


def test_a_step_that_fails_leaves_no_hooks_to_slow_down_the_next(describer: demands.Describer) -> None:
    before = hooks()
    model = torch.nn.Linear(4, 8)

    def fails() -> None:
        model(torch.randn(3, 5))

    with pytest.raises(RuntimeError):
        describer.describe(fails)
    assert hooks() == before


def test_cases_come_in_an_order_of_the_seed_with_their_precision() -> None:
    names = [f"model.{place}" for place in range(20)]
    lines = [json.dumps({"id": name, "family": "f", "argv": ["--precision", "tf32"]}) for name in names]
    found = list(demands.zoo(lines, seed=3))
    assert [one.name for one in found] == [one.name for one in demands.zoo(lines, seed=3)] != names
    assert sorted(one.name for one in found) == sorted(names)
    assert {one.precision for one in found} == {"tf32"}
