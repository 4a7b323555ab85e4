# mypy: disallow-subclassing-any=False
"""Image models of other kinds than classifiers: GAN, VAE, autoencoder, PixelCNN, triplets, diffusion, ConvNeXt."""

from __future__ import annotations

import argparse
import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def generator(width: int, size: int) -> Any:
    """A generator that makes an image from 128 numbers by doubling from 4 x 4."""
    doublings = int(math.log2(size)) - 2
    ins = width * 2 ** (doublings - 1)
    layers: list[Any] = [nn.ConvTranspose2d(128, ins, 4, bias=False), nn.BatchNorm2d(ins), nn.ReLU(True)]
    for _ in range(doublings - 1):
        layers += [nn.ConvTranspose2d(ins, ins // 2, 4, 2, 1, bias=False), nn.BatchNorm2d(ins // 2), nn.ReLU(True)]
        ins //= 2
    return nn.Sequential(*layers, nn.ConvTranspose2d(ins, 3, 4, 2, 1), nn.Tanh())


def discriminator(width: int, size: int) -> Any:
    layers: list[Any] = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True)]
    ins = width
    for _ in range(int(math.log2(size)) - 3):
        layers += [nn.Conv2d(ins, ins * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(ins * 2), nn.LeakyReLU(0.2, True)]
        ins *= 2
    return nn.Sequential(*layers, nn.Conv2d(ins, 1, 4), nn.Flatten())


def gan(width: int, size: int) -> tuple[Any, Any, Any]:
    model = nn.ModuleDict({"make": generator(width, size), "judge": discriminator(width, size)})

    def judge_loss(model: Any, batch: Any) -> Any:
        real, noise = batch
        on_real, on_made = model["judge"](real), model["judge"](model["make"](noise).detach())
        bce = F.binary_cross_entropy_with_logits
        return bce(on_real, torch.ones_like(on_real)) + bce(on_made, torch.zeros_like(on_made))

    def make_loss(model: Any, batch: Any) -> Any:
        verdict = model["judge"](model["make"](batch[1]))
        return F.binary_cross_entropy_with_logits(verdict, torch.ones_like(verdict))

    def make_batch(n: int) -> tuple[Any, Any]:
        return torch.randn(n, 3, size, size), torch.randn(n, 128, 1, 1)

    return model, make_batch, [(model["judge"], judge_loss), (model["make"], make_loss)]


class Vae(nn.Module):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        steps = [3, width, width * 2, width * 4, width * 8]
        self.down = nn.Sequential(*[
            nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.LeakyReLU())
            for a, b in itertools.pairwise(steps)
        ])  # fmt: skip
        self.side, self.deep = size // 16, steps[-1]
        self.mean = nn.Linear(self.deep * self.side**2, 128)
        self.spread = nn.Linear(self.deep * self.side**2, 128)
        self.start = nn.Linear(128, self.deep * self.side**2)
        back = steps[::-1]
        self.up = nn.Sequential(*[
            nn.Sequential(nn.ConvTranspose2d(a, b, 3, 2, 1, 1), nn.LeakyReLU())
            for a, b in itertools.pairwise(back)
        ])  # fmt: skip

    def forward(self, x: Any) -> Any:
        code = self.down(x).flatten(1)
        mean, spread = self.mean(code), self.spread(code)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * spread)
        return self.up(self.start(z).view(-1, self.deep, self.side, self.side)), mean, spread


def vae_loss(model: Any, batch: Any) -> Any:
    out, mean, spread = model(batch[0])
    return F.mse_loss(out, batch[0]) - 0.5 * torch.mean(1 + spread - mean.pow(2) - spread.exp())


def autoencoder(width: int) -> Any:
    steps = [3, width, width * 2, width * 4, width * 4]
    layers: list[Any] = []
    for a, b in itertools.pairwise(steps):
        layers += [nn.Conv2d(a, b, 4, 2, 1), nn.GELU()]
    for a, b in itertools.pairwise(steps[::-1]):
        layers += [nn.ConvTranspose2d(a, b, 4, 2, 1), nn.GELU()]
    return nn.Sequential(*layers[:-1], nn.Sigmoid())


class Masked(nn.Conv2d):
    """A convolution that sees only the pixels before its own."""

    def __init__(self, first: bool, ins: int, outs: int, kernel: int) -> None:
        super().__init__(ins, outs, kernel, padding=kernel // 2)
        mask = torch.ones(kernel, kernel)
        mask[kernel // 2, kernel // 2 + (0 if first else 1) :] = 0
        mask[kernel // 2 + 1 :] = 0
        self.register_buffer("mask", mask.expand_as(self.weight).clone())

    def forward(self, x: Any) -> Any:
        return F.conv2d(x, self.weight * self.mask, self.bias, padding=self.padding)


def pixel_cnn(width: int, layers: int) -> Any:
    body: list[Any] = [Masked(True, 3, width, 7)]
    for _ in range(layers):
        body += [nn.ReLU(), Masked(False, width, width, 3), nn.BatchNorm2d(width)]
    return nn.Sequential(*body, nn.ReLU(), nn.Conv2d(width, 256, 1))


def pixel_loss(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch[0]), batch[1])


def triplet_net() -> Any:
    layers: list[Any] = []
    for a, b in ((3, 64), (64, 128), (128, 256), (256, 256)):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.PReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(1024, 128))


def triplet_loss(model: Any, batch: Any) -> Any:
    near, same, far = (F.normalize(model(images)) for images in batch)
    return F.triplet_margin_loss(near, same, far)


class Permuted(nn.Module):
    """A ConvNeXt-like block: depthwise, then channels last for LayerNorm and two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.deep = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.wide, self.back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: Any) -> Any:
        out = self.norm(self.deep(x).permute(0, 2, 3, 1))
        out = self.scale * self.back(F.gelu(self.wide(out)))
        return x + out.permute(0, 3, 1, 2)


def permuted_net(width: int) -> Any:
    layers: list[Any] = [nn.Conv2d(3, width, 4, 4)]
    for stage, blocks in enumerate((2, 2, 6)):
        layers += [Permuted(width * 2**stage) for _ in range(blocks)]
        layers.append(nn.Conv2d(width * 2**stage, width * 2 ** (stage + 1), 2, 2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width * 8, 1000))


class Residual(nn.Module):
    """Residual block of a diffusion U-Net: GroupNorm, SiLU, the time added between two convolutions, optional
    attention."""

    def __init__(self, ins: int, outs: int, time: int, attend: bool) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, ins), nn.Conv2d(ins, outs, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(8, outs), nn.Conv2d(outs, outs, 3, padding=1)
        self.time, self.short = nn.Linear(time, outs), nn.Conv2d(ins, outs, 1)
        self.norm3 = nn.GroupNorm(8, outs) if attend else None
        self.attend = nn.MultiheadAttention(outs, 4, batch_first=True) if attend else None

    def forward(self, x: Any, time: Any) -> Any:
        out = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        out = self.conv2(F.silu(self.norm2(out))) + self.short(x)
        if self.attend is None or self.norm3 is None:
            return out
        flat = self.norm3(out).flatten(2).transpose(1, 2)
        seen, _ = self.attend(flat, flat, flat, need_weights=False)
        return out + seen.transpose(1, 2).reshape(out.shape)


class Diffusion(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        time, widths = width * 4, [width, width * 2, width * 2, width * 4]
        self.width, self.start = width, nn.Conv2d(3, width, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        ins = [width, *widths]
        self.down = nn.ModuleList(Residual(ins[i], widths[i], time, i >= 2) for i in range(4))
        self.mid = Residual(widths[-1], widths[-1], time, True)
        self.up = nn.ModuleList(Residual(widths[i] * 2, ins[i], time, i >= 2) for i in (3, 2, 1, 0))
        self.end = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, x: Any, when: Any) -> Any:
        rates = torch.exp(torch.arange(self.width // 2, device=x.device) * (-9.2 / (self.width // 2)))
        angles = when[:, None].float() * rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=1).to(x.dtype))
        x, kept = self.start(x), []
        for level, block in enumerate(self.down):
            x = block(x, time)
            kept.append(x)
            if level < 3:
                x = F.avg_pool2d(x, 2)
        x = self.mid(x, time)
        for level, block in enumerate(self.up):
            x = block(torch.cat([x, kept.pop()], dim=1), time)
            if level < 3:
                x = F.interpolate(x, scale_factor=2, mode="nearest")
        return self.end(x)


def diffusion_loss(model: Any, batch: Any) -> Any:
    clean, when = batch
    noise = torch.randn_like(clean)
    keep = torch.cos(when.float() / 1000 * 1.57)[:, None, None, None].to(clean.dtype)
    return F.mse_loss(model(keep * clean + (1 - keep**2).clamp(min=0).sqrt() * noise, when), noise)


def make(name: str, args: argparse.Namespace) -> tuple[Any, Any, Any] | None:
    side = args.size

    def images(n: int) -> Any:
        return torch.randn(n, 3, side, side)

    match name:
        case "own-dcgan":
            return gan(64, side)
        case "own-vae":
            return Vae(64, side), lambda n: [images(n)], vae_loss
        case "own-autoencoder":
            return autoencoder(64), lambda n: [images(n)], lambda model, batch: F.mse_loss(model(batch[0]), batch[0])
        case "own-pixelcnn":
            return pixel_cnn(96, 8), lambda n: (images(n), torch.randint(0, 256, (n, side, side))), pixel_loss
        case "own-triplet":
            return triplet_net(), lambda n: [images(n) for _ in range(3)], triplet_loss
        case "own-convnext":
            return permuted_net(96), lambda n: (images(n), torch.randint(0, 1000, (n,))), pixel_loss
        case "own-diffusion":
            return Diffusion(96), lambda n: (images(n), torch.randint(0, 1000, (n,))), diffusion_loss
        case _:
            return None
