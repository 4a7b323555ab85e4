# mypy: disallow-subclassing-any=False
"""The models of the published tasks that no library has, written plainly: U-Net, DLRM and the MNIST example."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

SEGMENTS = 21  # of PASCAL VOC
DENSE, TABLES, WIDTH = 13, 26, 64  # of Criteo: figures and categories of a row; how wide an embedding is


class Up(nn.Module):
    """Twice the size, the encoder's features beside it, two convolutions."""

    def __init__(self, before: int, beside: int, after: int) -> None:
        super().__init__()
        parts: list[Any] = []
        for width in (before + beside, after):
            parts += [nn.Conv2d(width, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
        self.parts = nn.Sequential(*parts)

    def forward(self, data: Any, beside: Any | None) -> Any:
        data = F.interpolate(data, scale_factor=2.0, mode="nearest")
        return self.parts(data if beside is None else torch.cat([data, beside], 1))


class UNet(nn.Module):
    """An encoder of ResNet-34 and five steps up to full size, as the segmentation library builds it by default."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.stem = nn.Sequential(encoder.conv1, encoder.bn1, encoder.relu)
        self.pool = encoder.maxpool
        self.stages = nn.ModuleList([encoder.layer1, encoder.layer2, encoder.layer3, encoder.layer4])
        widths = ((512, 256, 256), (256, 128, 128), (128, 64, 64), (64, 64, 32), (32, 0, 16))
        self.ups = nn.ModuleList(Up(*width) for width in widths)
        self.head = nn.Conv2d(16, SEGMENTS, 3, padding=1)

    def forward(self, images: Any) -> Any:
        features = [self.stem(images)]
        data = self.pool(features[0])
        for stage in self.stages:
            data = stage(data)
            features.append(data)
        data = features.pop()
        for up in self.ups:
            data = up(data, features.pop() if features else None)
        return self.head(data)


def dice_loss(answer: Any, wanted: Any) -> Any:
    """One less twice the overlap over the sum, of each class."""
    shares = answer.softmax(1)
    truth = F.one_hot(wanted, SEGMENTS).permute(0, 3, 1, 2).to(shares.dtype)
    overlap, total = (shares * truth).sum((0, 2, 3)), (shares + truth).sum((0, 2, 3))
    return (1.0 - 2.0 * overlap / total.clamp_min(1e-7)).mean()


def layers(*widths: int, last: Any) -> nn.Sequential:
    parts: list[Any] = []
    for before, after in pairwise(widths):
        parts += [nn.Linear(before, after), nn.ReLU()]
    parts[-1] = last
    return nn.Sequential(*parts)


class Dlrm(nn.Module):
    """Figures through a small network, categories through tables, all pairs of them multiplied, a network on top."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, WIDTH, mode="sum", sparse=True) for _ in range(TABLES))
        self.bottom = layers(DENSE, 512, 256, 128, WIDTH, last=nn.ReLU())
        pairs = torch.tril_indices(TABLES + 1, TABLES + 1, offset=-1)
        self.register_buffer("rows_of", pairs[0])
        self.register_buffer("columns_of", pairs[1])
        self.top = layers(WIDTH + TABLES * (TABLES + 1) // 2, 1024, 512, 256, 1, last=nn.Sigmoid())

    def forward(self, figures: Any, places: Any, starts: Any) -> Any:
        dense = self.bottom(figures)
        parts = [dense] + [table(places[index], starts) for index, table in enumerate(self.tables)]
        stacked = torch.stack(parts, 1)
        pairs = torch.bmm(stacked, stacked.transpose(1, 2))[:, self.rows_of, self.columns_of]
        return self.top(torch.cat([dense, pairs], 1)).squeeze(1)


def mnist() -> nn.Sequential:
    """PyTorch's own example for MNIST."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )
