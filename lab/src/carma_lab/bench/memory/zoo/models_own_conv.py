# mypy: disallow-subclassing-any=False
"""Convolutional nets as users write them by hand: U-Nets, audio, speech, squeeze-and-excitation, CIFAR."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Double(nn.Module):
    """Two convolutions with batch norm and inplace ReLU, in two or three dimensions."""

    def __init__(self, dims: int, ins: int, outs: int) -> None:
        super().__init__()
        conv, norm = (nn.Conv2d, nn.BatchNorm2d) if dims == 2 else (nn.Conv3d, nn.BatchNorm3d)
        self.body = nn.Sequential(
            conv(ins, outs, 3, padding=1, bias=False),
            norm(outs),
            nn.ReLU(inplace=True),
            conv(outs, outs, 3, padding=1, bias=False),
            norm(outs),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Any) -> Any:
        return self.body(x)


class UNet(nn.Module):
    def __init__(self, dims: int, width: int, depth: int, ins: int, classes: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth)]
        up = nn.ConvTranspose2d if dims == 2 else nn.ConvTranspose3d
        self.pool = nn.MaxPool2d(2) if dims == 2 else nn.MaxPool3d(2)
        self.down = nn.ModuleList(Double(dims, a, b) for a, b in zip([ins, *widths], widths, strict=False))
        self.rise = nn.ModuleList(up(a * 2, a, 2, stride=2) for a in widths[-2::-1])
        self.join = nn.ModuleList(Double(dims, a * 2, a) for a in widths[-2::-1])
        self.head = (nn.Conv2d if dims == 2 else nn.Conv3d)(width, classes, 1)

    def forward(self, x: Any) -> Any:
        kept = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else self.pool(x))
            kept.append(x)
        kept.pop()
        for rise, join in zip(self.rise, self.join, strict=True):
            x = join(torch.cat([kept.pop(), rise(x)], dim=1))
        return self.head(x)


class Basic(nn.Module):
    def __init__(self, ins: int, outs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(ins, outs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outs)
        self.conv2 = nn.Conv2d(outs, outs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outs)
        self.short = nn.Conv2d(ins, outs, 1, stride, bias=False) if stride != 1 or ins != outs else nn.Identity()

    def forward(self, x: Any) -> Any:
        out = F.relu(self.norm1(self.conv1(x)), inplace=True)
        out = self.norm2(self.conv2(out))
        out += self.short(x)
        return F.relu(out, inplace=True)


def cifar_resnet(blocks: int, width: int) -> Any:
    layers: list[Any] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    ins = width
    for stage in range(3):
        for block in range(blocks):
            layers.append(Basic(ins, width * 2**stage, 2 if stage and not block else 1))
            ins = width * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(ins, 10))


class Squeeze(nn.Module):
    """A mobile block: expand, depthwise, squeeze-and-excitation, project; activations in place."""

    def __init__(self, width: int, expand: int = 4) -> None:
        super().__init__()
        wide = width * expand
        self.expand = nn.Sequential(nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU(inplace=True))
        self.deep = nn.Sequential(
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.Hardswish(inplace=True),
        )
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(wide, wide // 8, 1),
            nn.ReLU(inplace=True),
            nn.Conv2d(wide // 8, wide, 1),
            nn.Hardsigmoid(inplace=True),
        )
        self.project = nn.Sequential(nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Any) -> Any:
        out = self.deep(self.expand(x))
        out = out * self.gate(out)
        return x + self.project(out)


def squeeze_net(width: int, blocks: int) -> Any:
    stages: list[Any] = [nn.Conv2d(3, width, 4, 4)]
    for stage in range(3):
        stages += [Squeeze(width * 2**stage) for _ in range(blocks)]
        if stage < 2:
            stages.append(nn.Conv2d(width * 2**stage, width * 2 ** (stage + 1), 2, 2))
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(width * 4, 1000))


class Gated(nn.Module):
    """One dilated, gated layer of a WaveNet."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.pad = 2 * dilation
        self.conv = nn.Conv1d(width, 2 * width, 3, dilation=dilation)
        self.out = nn.Conv1d(width, 2 * width, 1)

    def forward(self, x: Any) -> Any:
        left, right = self.conv(F.pad(x, (self.pad, 0))).chunk(2, dim=1)
        rest, skip = self.out(torch.tanh(left) * torch.sigmoid(right)).chunk(2, dim=1)
        return x + rest, skip


class WaveNet(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.start = nn.Conv1d(1, width, 1)
        self.layers = nn.ModuleList(Gated(width, 2 ** (layer % 9)) for layer in range(layers))
        self.end = nn.Sequential(nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, 256, 1))

    def forward(self, x: Any) -> Any:
        x = self.start(x)
        total = 0
        for layer in self.layers:
            x, skip = layer(x)
            total = total + skip
        return self.end(total)


class Speech(nn.Module):
    """Convolutions over a spectrogram, a bidirectional GRU, and CTC over characters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 32, 5, 2, 2),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20, inplace=True),
            nn.Conv2d(32, 32, 5, (1, 2), 2),
        )
        self.rnn = nn.GRU(32 * 20, width, 3, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, 29)

    def forward(self, x: Any) -> Any:
        x = F.relu(self.conv(x))
        out, _ = self.rnn(x.permute(0, 2, 1, 3).flatten(2))
        return self.head(out).log_softmax(-1)


def ctc_loss(model: Any, batch: Any) -> Any:
    spectrum, targets, target_lengths = batch
    out = model(spectrum).float().transpose(0, 1)
    lengths = torch.full((out.shape[1],), out.shape[0], dtype=torch.long)
    return F.ctc_loss(out, targets, lengths, target_lengths, blank=28, zero_infinity=True)


def speech_batch(n: int, frames: int) -> tuple[Any, ...]:
    return torch.randn(n, 1, frames, 80), torch.randint(0, 28, (n, frames // 16)), torch.full((n,), frames // 16)


def cross_entropy(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch[0]), batch[1])


def images(n: int, size: int, classes: int) -> tuple[Any, Any]:
    return torch.randn(n, 3, size, size), torch.randint(0, classes, (n,))


def make(name: str, args: argparse.Namespace) -> tuple[Any, Any, Any] | None:
    side = args.size
    match name:
        case "own-unet2d" | "own-unet2d-small":
            model = UNet(2, 64, 5, 3, 2) if name == "own-unet2d" else UNet(2, 24, 4, 3, 2)
            return model, lambda n: (torch.randn(n, 3, side, side), torch.randint(0, 2, (n, side, side))), cross_entropy
        case "own-unet3d":
            cube = (side, side, side)
            return (
                UNet(3, 24, 4, 1, 4),
                lambda n: (torch.randn(n, 1, *cube), torch.randint(0, 4, (n, *cube))),
                cross_entropy,
            )
        case "own-cifar-resnet" | "own-cifar-resnet-wide":
            model = cifar_resnet(9, 16) if name == "own-cifar-resnet" else cifar_resnet(4, 160)
            return model, lambda n: images(n, side, 10), cross_entropy
        case "own-se-net" | "own-se-net-wide":
            model = squeeze_net(32, 4) if name == "own-se-net" else squeeze_net(64, 6)
            return model, lambda n: images(n, side, 1000), cross_entropy
        case "own-wavenet":
            batch = lambda n: (torch.randn(n, 1, side), torch.randint(0, 256, (n, side)))  # noqa: E731
            return WaveNet(64, 27), batch, cross_entropy
        case "own-ctc":
            return Speech(512), lambda n: speech_batch(n, side), ctc_loss
        case _:
            return None
