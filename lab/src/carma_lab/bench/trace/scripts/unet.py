"""A U-Net for segmentation, fp32."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn


def double(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self, width, depth, classes):
        super().__init__()
        sizes = [width << level for level in range(depth + 1)]
        self.down = nn.ModuleList(double(3 if not level else sizes[level - 1], sizes[level]) for level in range(depth))
        self.bottom = double(sizes[-2], sizes[-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(sizes[i + 1], sizes[i], 2, 2) for i in reversed(range(depth)))
        self.merge = nn.ModuleList(double(2 * sizes[i], sizes[i]) for i in reversed(range(depth)))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, merge in zip(self.up, self.merge):
            x = merge(torch.cat([up(x), skips.pop()], dim=1))
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    batch, size, width, depth, images = (2, 16, 4, 2, 4) if args.tiny else (args.batch, 256, 64, 4, 200)

    data = torch.rand(images, 3, size, size)
    masks = (data.mean(1) > 0.5).long()
    model = UNet(width, depth, 2).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    start, every = time.time(), max(1, args.steps // 20)
    for step in range(1, args.steps + 1):
        chosen = torch.randint(0, images, (batch,))
        loss = F.cross_entropy(model(data[chosen].to(args.device)), masks[chosen].to(args.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % every == 0 or step == args.steps:
            print(f"step {step}  loss {loss.item():.4f}  {time.time() - start:.2f} s", flush=True)


if __name__ == "__main__":
    main()
