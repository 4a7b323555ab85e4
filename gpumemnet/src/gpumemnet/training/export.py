"""Learned nets as ONNX graphs from unscaled features to MiB; they include scaling, ensemble and shifts."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gpumemnet.serving.features import FEATURES, PLACE, TOKEN
from gpumemnet.serving.model import NEAR
from gpumemnet.training.dense import Dense
from gpumemnet.training.ensemble import PLAIN_RANGE, Learned
from gpumemnet.training.learners import AttentionMembers
from gpumemnet.training.samples import MEDIAN


class Answer(nn.Module):
    """Converts z of [members, n, quantiles] to MiB: the end of every graph."""

    def __init__(self, learned: Learned) -> None:
        super().__init__()
        self.base_mib, self.room_mib = learned.scale.base_mib, learned.scale.room_mib
        self.context_mib = learned.context_mib
        self.register_buffer("shifts", torch.from_numpy(learned.shifts).float())

    def forward(self, z: Tensor, scalars: Tensor) -> Tensor:
        moved = z.mean(0) + self.shifts
        rising = [moved[:, :1]]
        for place in range(1, moved.shape[1]):
            rising.append(torch.maximum(rising[-1], moved[:, place : place + 1]))
        guess = torch.exp2(scalars[:, PLACE["guess_mib"], None]) - 1.0
        mib = self.base_mib + torch.cat(rising, 1).exp() * (guess + self.room_mib)
        return mib if self.context_mib is None else with_arithmetic(mib, guess + self.context_mib)


def with_arithmetic(mib: Tensor, plain_mib: Tensor) -> Tensor:
    """The same as `ensemble.with_arithmetic`, in torch."""
    low, high = (mib[:, place : place + 1] for place in PLAIN_RANGE)
    middle = torch.where((plain_mib >= low) & (plain_mib <= high), plain_mib, mib[:, MEDIAN : MEDIAN + 1])
    return torch.cat([torch.minimum(mib[:, :MEDIAN], middle), middle, torch.maximum(mib[:, MEDIAN + 1 :], middle)], 1)


class OfScalars(nn.Module):
    def __init__(self, learned: Learned) -> None:
        super().__init__()
        self.net: nn.Module = learned.members
        self.answer = Answer(learned)

    def forward(self, scalars: Tensor) -> Tensor:
        return self.answer(self.net(scalars), scalars)


class OfLayers(nn.Module):
    def __init__(self, learned: Learned) -> None:
        super().__init__()
        self.nets: nn.ModuleList = learned.members
        self.answer = Answer(learned)

    def forward(self, scalars: Tensor, kinds: Tensor, tokens: Tensor, weights: Tensor) -> Tensor:
        return self.answer(torch.stack([net(scalars, kinds, tokens, weights) for net in self.nets]), scalars)


def module_of(learned: Learned) -> nn.Module:
    for kind, graph in ((Dense, OfScalars), (AttentionMembers, OfLayers)):
        if isinstance(learned.members, kind):
            return graph(learned).eval()
    raise TypeError(f"{type(learned.members).__name__} has no ONNX form")


def export(learned: Learned) -> bytes:
    """The bytes of an ONNX file with its weights."""
    module = module_of(learned)
    rows, layers = torch.export.Dim("rows"), torch.export.Dim("layers")
    inputs: dict[str, Tensor] = {"scalars": torch.zeros(3, len(FEATURES))}
    shapes: dict[str, dict[int, object]] = {"scalars": {0: rows}}
    if isinstance(module, OfLayers):
        inputs |= {
            "kinds": torch.zeros(3, 7, NEAR, dtype=torch.int64),
            "tokens": torch.zeros(3, 7, NEAR, len(TOKEN)),
            "weights": torch.ones(3, 7),
        }
        shapes |= {name: {0: rows, 1: layers} for name in ("kinds", "tokens", "weights")}
    with hushed():
        made = torch.onnx.export(
            module,
            tuple(inputs.values()),
            input_names=list(inputs),
            output_names=["quantiles"],
            dynamo=True,
            dynamic_shapes=tuple(shapes.values()),
            verbose=False,
        )
    assert made is not None  # because no file is named
    return _bare(made.model_proto)


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """Hides warnings of the exporter about itself and about libraries that are not needed."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _bare(model: Any) -> bytes:
    """The graph without the exporter's notes about the origin of each node: paths of this machine, half of the file."""
    import onnx

    graph = model.graph
    for part in (model, graph, *graph.node, *graph.value_info, *graph.input, *graph.output, *graph.initializer):
        part.doc_string = ""
        del part.metadata_props[:]
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())
