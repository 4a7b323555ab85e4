# mypy: disallow-subclassing-any=False
"""Xception, which torchvision does not have, as its paper describes it (arXiv 1610.02357, figure 5).

Where the paper leaves a choice, it is made as in the published workloads' library: activations work in place but for
the first of a block, whose input the shortcut still needs.
"""

from __future__ import annotations

from typing import Any

from torch import nn

# Of each block: channels in, channels out, how many convolutions, stride, whether the first one widens.
BLOCKS = (
    (64, 128, 2, 2, True),
    (128, 256, 2, 2, True),
    (256, 728, 2, 2, True),
    *((728, 728, 3, 1, True),) * 8,
    (728, 1024, 2, 2, False),
)


def separable(width_in: int, width_out: int) -> nn.Sequential:
    """Each channel by itself in space, then all of them at each point."""
    each = nn.Conv2d(width_in, width_in, 3, padding=1, groups=width_in, bias=False)
    return nn.Sequential(each, nn.Conv2d(width_in, width_out, 1, bias=False))


def narrow(width_in: int, width_out: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(width_in, width_out, 3, stride, bias=False)
    return [convolution, nn.BatchNorm2d(width_out), nn.ReLU(inplace=True)]


class Block(nn.Module):
    def __init__(self, width_in: int, width_out: int, count: int, stride: int, widens_first: bool, first: bool) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for place in range(count):
            wide = place > 0 if widens_first else place == count - 1
            before = width_out if wide and widens_first else width_in
            after = width_out if widens_first or wide else width_in
            parts += [] if first and not place else [nn.ReLU(inplace=place > 0)]
            parts += [separable(before, after), nn.BatchNorm2d(after)]
        if stride > 1:
            parts.append(nn.MaxPool2d(3, stride, 1))
        self.parts = nn.Sequential(*parts)
        self.shortcut = nn.Sequential()
        if width_in != width_out or stride > 1:
            convolution = nn.Conv2d(width_in, width_out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(width_out))

    def forward(self, images: Any) -> Any:
        changed = self.parts(images)
        changed += self.shortcut(images)
        return changed


class Xception(nn.Module):
    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(*narrow(3, 32, 2), *narrow(32, 64, 1))
        self.blocks = nn.Sequential(*(Block(*block, first=not place) for place, block in enumerate(BLOCKS)))
        wide = [
            part
            for before, after in ((1024, 1536), (1536, 2048))
            for part in (separable(before, after), nn.BatchNorm2d(after), nn.ReLU(inplace=True))
        ]
        self.head = nn.Sequential(*wide, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, classes))

    def forward(self, images: Any) -> Any:
        return self.head(self.blocks(self.stem(images)))
