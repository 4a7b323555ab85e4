"""A MobileNetV3-like network (inverted residuals, squeeze and excitation, hard swish) on small images."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn

# expansion, channels, repeats, stride, squeeze and excitation
STAGES = [(1, 16, 1, 1, True), (4, 24, 2, 2, False), (4, 40, 3, 2, True), (4, 48, 2, 1, True), (6, 96, 3, 2, True)]


class SqueezeExcitation(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.reduce = nn.Conv2d(channels, channels // 4, 1)
        self.expand = nn.Conv2d(channels // 4, channels, 1)

    def forward(self, x):
        scale = F.adaptive_avg_pool2d(x, 1)
        return x * F.hardsigmoid(self.expand(F.relu(self.reduce(scale))))


class InvertedResidual(nn.Module):
    def __init__(self, inputs, outputs, expansion, stride, squeeze):
        super().__init__()
        hidden = inputs * expansion
        self.residual = stride == 1 and inputs == outputs
        layers = [nn.Conv2d(inputs, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.Hardswish()]
        layers += [nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False), nn.BatchNorm2d(hidden)]
        layers += [nn.Hardswish()] + ([SqueezeExcitation(hidden)] if squeeze else [])
        layers += [nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        out = self.layers(x)
        return x + out if self.residual else out


def mobilenet(classes):
    layers, inputs = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish()], 16
    for expansion, outputs, repeats, stride, squeeze in STAGES:
        for repeat in range(repeats):
            layers.append(InvertedResidual(inputs, outputs, expansion, stride if repeat == 0 else 1, squeeze))
            inputs = outputs
    head = [nn.Conv2d(inputs, 576, 1), nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, *head, nn.Linear(576, classes))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    batch, size, images = (4, 16, 16) if args.tiny else (args.batch, 32, 8192)

    # The whole data set fits on the GPU.
    data = torch.randn(images, 3, size, size, device=args.device)
    labels = torch.randint(0, 100, (images,), device=args.device)
    model = mobilenet(100).to(args.device)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-5)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

    start, every = time.time(), max(1, args.steps // 20)
    for step in range(1, args.steps + 1):
        chosen = torch.randint(0, images, (batch,), device=args.device)
        loss = F.cross_entropy(model(data[chosen]), labels[chosen], label_smoothing=0.1)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % every == 0 or step == args.steps:
            print(f"step {step}  loss {loss.item():.4f}  {time.time() - start:.2f} s", flush=True)


if __name__ == "__main__":
    main()
