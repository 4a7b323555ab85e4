"""The training tasks of the interference study: light to heavy, fp32 and bf16, some held back by their CPU side.

Each is a model with made-up data that lies on the GPU (or is made on the CPU in every step, where the name says `cpu`).
A step is forward, backward and an optimizer step. torch and torchvision are imported when a workload is built.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

Step = Callable[[], None]


class Workload(NamedTuple):
    name: str
    family: str
    build: Callable[[], Step]


def train(model: Any, batch: Any, target: Any, *, bf16: bool = False, cpu_ms: float = 0.0, loss: Any = None) -> Step:
    """One step of ordinary training; `cpu_ms` of work on the CPU and a copy to the GPU go before it where asked for."""
    import torch

    model = model.cuda().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    criterion = loss or torch.nn.CrossEntropyLoss()
    staging = batch.cpu().pin_memory() if cpu_ms else None

    def step() -> None:
        data = batch
        if staging is not None:
            _work_on_cpu(cpu_ms)
            data = staging.cuda(non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
            answer = model(data)
            answer = answer if torch.is_tensor(answer) else answer[0]
            cost = criterion(answer.flatten(0, -2) if answer.dim() > 2 and target.dim() == 1 else answer, target)
        cost.backward()
        optimizer.step()

    return step


def _work_on_cpu(milliseconds: float) -> None:
    """Busy, as a data loader in the training process is."""
    import time

    until = time.perf_counter() + milliseconds / 1e3
    while time.perf_counter() < until:
        pass


def _image(name: str, batch: int, size: int, *, bf16: bool = False, cpu_ms: float = 0.0) -> Step:
    import torch
    import torchvision

    model = torchvision.models.get_model(name, num_classes=100)
    images = torch.randn(batch, 3, size, size, device="cuda")
    labels = torch.randint(0, 100, (batch,), device="cuda")
    return train(model, images, labels, bf16=bf16, cpu_ms=cpu_ms)


def _encoder(width: int, layers: int, batch: int, length: int, *, bf16: bool) -> Step:
    """A transformer encoder over tokens, with a classifier for each place (as in masked language modelling)."""

    import torch
    from torch import nn

    layer = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, batch_first=True, dropout=0.1)
    body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(8_000, width), body, nn.Linear(width, 8_000))
    tokens = torch.randint(0, 8_000, (batch, length), device="cuda")
    return train(model, tokens, tokens.flatten(), bf16=bf16)


def _mlp(width: int, depth: int, batch: int, *, bf16: bool = False) -> Step:
    import torch
    from torch import nn

    layers: list[Any] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, 100))
    data = torch.randn(batch, width, device="cuda")
    return train(model, data, torch.randint(0, 100, (batch,), device="cuda"), bf16=bf16)


def _lstm(width: int, layers: int, batch: int, length: int) -> Step:
    import torch
    from torch import nn

    class Net(nn.Module):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.LSTM(width, width, layers, batch_first=True)
            self.head = nn.Linear(width, 100)

        def forward(self, data: Any) -> Any:
            return self.head(self.body(data)[0][:, -1])

    data = torch.randn(batch, length, width, device="cuda")
    return train(Net(), data, torch.randint(0, 100, (batch,), device="cuda"))


def _embeddings(rows: int, width: int, tables: int, batch: int) -> Step:
    """Recommendation: large embedding tables, little arithmetic; bound by memory."""

    import torch
    from torch import nn

    class Net(nn.Module):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
            self.head = nn.Sequential(nn.Linear(width * tables, 512), nn.ReLU(), nn.Linear(512, 2))

        def forward(self, places: Any) -> Any:
            return self.head(torch.cat([table(places[i]) for i, table in enumerate(self.tables)], 1))

    places = torch.randint(0, rows, (tables, batch, 8), device="cuda")
    return train(Net(), places, torch.randint(0, 2, (batch,), device="cuda"))


# Name, family, builder, and the builder's arguments.
BUILDERS: dict[str, Callable[..., Step]] = {
    "image": _image,
    "encoder": _encoder,
    "mlp": _mlp,
    "lstm": _lstm,
    "embeddings": _embeddings,
}
WORKLOADS = tuple(
    Workload(name, family, partial(BUILDERS[builder], *arguments, **options))
    for name, family, builder, arguments, options in json.loads(Path(__file__).with_suffix(".json").read_text())
)
BY_NAME = {workload.name: workload for workload in WORKLOADS}
