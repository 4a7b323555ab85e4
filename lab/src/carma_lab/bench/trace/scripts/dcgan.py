"""A DCGAN: generator and discriminator with an optimizer each."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn


def initialize(module):
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.02)


def generator(latent, width):
    def up(inputs, outputs, stride, padding):
        return [
            nn.ConvTranspose2d(inputs, outputs, 4, stride, padding, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(True),
        ]

    layers = [*up(latent, 8 * width, 1, 0), *up(8 * width, 4 * width, 2, 1), *up(4 * width, 2 * width, 2, 1)]
    return nn.Sequential(*layers, nn.ConvTranspose2d(2 * width, 3, 4, 2, 1), nn.Tanh())


def discriminator(width):
    def down(inputs, outputs):
        return [nn.Conv2d(inputs, outputs, 4, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.LeakyReLU(0.2, True)]

    layers = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2, True), *down(width, 2 * width)]
    return nn.Sequential(*layers, *down(2 * width, 4 * width), nn.Conv2d(4 * width, 1, 4, 1, 0), nn.Flatten(0))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    batch, width, latent, images = (4, 4, 8, 16) if args.tiny else (args.batch, 64, 100, 10_000)

    data = torch.rand(images, 3, 32, 32) * 2 - 1
    g, d = generator(latent, width).to(args.device), discriminator(width).to(args.device)
    g.apply(initialize)
    d.apply(initialize)
    g_optimizer = torch.optim.Adam(g.parameters(), lr=2e-4, betas=(0.5, 0.999))
    d_optimizer = torch.optim.Adam(d.parameters(), lr=2e-4, betas=(0.5, 0.999))
    ones, zeros = torch.ones(batch, device=args.device), torch.zeros(batch, device=args.device)

    start, every = time.time(), max(1, args.steps // 20)
    for step in range(1, args.steps + 1):
        real = data[torch.randint(0, images, (batch,))].to(args.device)
        fake = g(torch.randn(batch, latent, 1, 1, device=args.device))
        d_loss = F.binary_cross_entropy_with_logits(d(real), ones)
        d_loss = d_loss + F.binary_cross_entropy_with_logits(d(fake.detach()), zeros)
        d_optimizer.zero_grad()
        d_loss.backward()
        d_optimizer.step()

        loss = F.binary_cross_entropy_with_logits(d(fake), ones)
        g_optimizer.zero_grad()
        loss.backward()
        g_optimizer.step()
        if step % every == 0 or step == args.steps:
            print(f"step {step}  loss {loss.item():.4f}  {time.time() - start:.2f} s", flush=True)


if __name__ == "__main__":
    main()
