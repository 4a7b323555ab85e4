"""ResNet-18 or ResNet-34 on CIFAR-sized images, fp32 or fp16 with a gradient scaler."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.shortcut(x))


def resnet(depth, width):
    layers = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inputs = width
    for stage, blocks in enumerate(BLOCKS[depth]):
        for block in range(blocks):
            outputs = width << stage
            layers.append(Block(inputs, outputs, 2 if stage and not block else 1))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 100))


def batches(loader):
    while True:
        yield from loader


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--depth", type=int, default=18, choices=BLOCKS)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    batch, width, images = (4, 8, 16) if args.tiny else (args.batch, 64, 10_000)

    data = TensorDataset(torch.randn(images, 3, 32, 32), torch.randint(0, 100, (images,)))
    loader = DataLoader(data, batch_size=batch, shuffle=True, drop_last=True)
    model = resnet(args.depth, width).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    scaler = torch.amp.GradScaler(args.device, enabled=args.amp and args.device == "cuda")

    start, every = time.time(), max(1, args.steps // 20)
    for step, (image, label) in zip(range(1, args.steps + 1), batches(loader)):
        image, label = image.to(args.device), label.to(args.device)
        with torch.autocast(args.device, dtype=torch.float16, enabled=scaler.is_enabled()):
            loss = F.cross_entropy(model(image), label)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % every == 0 or step == args.steps:
            print(f"step {step}  loss {loss.item():.4f}  {time.time() - start:.2f} s", flush=True)


if __name__ == "__main__":
    main()
