"""ResNet-50 on images of 224 pixels, bf16, channels last."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class RandomImages(Dataset):
    def __init__(self, images, size):
        self.images, self.size = images, size

    def __len__(self):
        return self.images

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, 256, (3, self.size, self.size), generator=generator, dtype=torch.uint8), index % 1000


def conv(inputs, outputs, size, stride=1):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )


class Bottleneck(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        self.a, self.b, self.c = conv(inputs, width, 1), conv(width, width, 3, stride), conv(width, 4 * width, 1)
        project = stride != 1 or inputs != 4 * width
        self.shortcut = conv(inputs, 4 * width, 1, stride) if project else nn.Identity()

    def forward(self, x):
        out = self.c(F.relu(self.b(F.relu(self.a(x)))))
        return F.relu(out + self.shortcut(x))


def resnet50(width, blocks):
    layers, inputs = [conv(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], width
    for stage, count in enumerate(blocks):
        for block in range(count):
            layers.append(Bottleneck(inputs, width << stage, 2 if stage and not block else 1))
            inputs = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


def batches(loader):
    while True:
        yield from loader


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    batch, size, width, blocks = (2, 32, 4, (1, 1, 1, 1)) if args.tiny else (args.batch, 224, 64, (3, 4, 6, 3))
    workers = 0 if args.tiny else args.workers

    data = RandomImages(16 if args.tiny else 100_000, size)
    cuda = args.device == "cuda"
    loader = DataLoader(data, batch, shuffle=True, drop_last=True, num_workers=workers, pin_memory=cuda)
    model = resnet50(width, blocks).to(args.device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)

    start, every = time.time(), max(1, args.steps // 20)
    for step, (image, label) in zip(range(1, args.steps + 1), batches(loader)):
        image = image.to(args.device, non_blocking=True).float().div_(255).sub_(0.45).div_(0.25)
        image = image.to(memory_format=torch.channels_last)
        with torch.autocast(args.device, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(image), label.to(args.device, non_blocking=True), label_smoothing=0.1)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % every == 0 or step == args.steps:
            print(f"step {step}  loss {loss.item():.4f}  {time.time() - start:.2f} s", flush=True)


if __name__ == "__main__":
    main()
