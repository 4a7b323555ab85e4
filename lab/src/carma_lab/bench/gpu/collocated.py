"""The two tasks of the published collocation analysis: one that leaves most of a GPU idle, and one that fills it.

ResNet-26 for CIFAR-10 is built here, in the form that He et al. 2015 (arXiv 1512.03385, section 4.2) give for small
images: 6n+2 layers, n = 4, three stages of 16, 32 and 64 channels, shortcuts without parameters; 0.37 million
parameters. ResNet-152 is torchvision's. Both train with batch 32 on made-up images that lie on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from carma_lab.bench.gpu.workloads import BY_NAME, Step, Workload, train

BATCH = 32
BLOCKS_A_STAGE = 4  # 6n+2 layers with n = 4


def resnet26(classes: int = 10) -> Any:
    """The model, on the CPU."""
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):  # type: ignore[misc, unused-ignore]
        def __init__(self, before: int, width: int) -> None:
            super().__init__()
            self.stride, self.added = (1, 0) if before == width else (2, width - before)
            self.first = nn.Conv2d(before, width, 3, self.stride, 1, bias=False)
            self.first_norm = nn.BatchNorm2d(width)
            self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
            self.second_norm = nn.BatchNorm2d(width)

        def forward(self, data: Any) -> Any:
            inner = functional.relu(self.first_norm(self.first(data)))
            past = data[:, :, :: self.stride, :: self.stride]
            past = functional.pad(past, (0, 0, 0, 0, 0, self.added)) if self.added else past
            return functional.relu(self.second_norm(self.second(inner)) + past)

    widths = [16] * BLOCKS_A_STAGE + [32] * BLOCKS_A_STAGE + [64] * BLOCKS_A_STAGE
    blocks = [Block(before, width) for before, width in zip([16, *widths], widths, strict=False)]
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def resnet152(classes: int = 1000) -> Any:
    import torchvision

    return torchvision.models.resnet152(num_classes=classes)


def _images(model: Callable[[int], Any], size: int, classes: int) -> Step:
    import torch

    images = torch.randn(BATCH, 3, size, size, device="cuda")
    return train(model(classes), images, torch.randint(0, classes, (BATCH,), device="cuda"))


SMALL = Workload("resnet26-cifar10-b32", "cnn", partial(_images, resnet26, 32, 10))
LARGE = Workload("resnet152-imagenet-b32", "cnn", partial(_images, resnet152, 224, 1000))
COLLOCATED = {"small": SMALL, "large": LARGE}


def find(name: str) -> Workload:
    """A workload of either study, for the worker."""
    return BY_NAME.get(name) or next(workload for workload in COLLOCATED.values() if workload.name == name)
