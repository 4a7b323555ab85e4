"""Runs to learn from, made up: small networks whose footprint follows a simple rule, with a little noise."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from carma.trial.layers.description import Described, Layer
from gpumemnet.serving.model_facts import LearnedFrom
from gpumemnet.training.cross_validation import make_deterministic
from gpumemnet.training.samples import Run, Samples, chain, gather

SHAPES = ("uniform", "pyramid", "bottleneck")
BASE_MIB = 500.0


def run(rng: np.random.Generator, shape: str) -> Run:
    batch, width = int(rng.integers(1, 512)), int(rng.integers(64, 4096))
    layers: list[Layer] = []
    for place in range(int(rng.integers(1, 7))):
        after = width if shape == "uniform" else max(8, width // 2)
        layers.append(Layer(kind="Linear", output=(batch, after), parameters=width * after + after))
        layers.append(Layer(kind="ReLU" if place % 2 else "GELU", output=(batch, after)))
        width = after
    parameters = sum(layer.parameters for layer in layers)
    kept = sum(batch * layer.output[1] for layer in layers)
    tensors = (16 * parameters + 5 * kept) / 2**20
    described = Described(layers=tuple(layers), batch=batch, parameters=parameters, input=(batch, width))
    return Run(described, shape, BASE_MIB + tensors * float(rng.normal(1.2, 0.01)), chain(len(layers)))


def made(rows: int, seed: int = 0) -> Samples:
    rng = np.random.default_rng(seed)
    runs = [run(rng, SHAPES[place % len(SHAPES)]) for place in range(rows)]
    return gather(
        "mlp", runs, LearnedFrom(data_sha256={"made": "0" * 64}, rows=len(runs), gpu="NVIDIA H200", torch="2.11.0"), {}
    )


@pytest.fixture(autouse=True)
def threads_as_they_were() -> Iterator[None]:
    """What `make_deterministic` sets holds for the whole process, where other tests run too."""
    import torch

    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    make_deterministic()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(strict)
