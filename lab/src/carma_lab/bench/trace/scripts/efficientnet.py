"""EfficientNet-B0 of transformers, from its configuration, on images of 64 pixels."""

import argparse
import time

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import EfficientNetConfig, EfficientNetForImageClassification


class RandomImages(Dataset):
    """Images of noise, made when they are read, as a decoder would."""

    def __init__(self, images, size):
        self.images, self.size = images, size

    def __len__(self):
        return self.images

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image = torch.randint(0, 256, (3, self.size, self.size), generator=generator, dtype=torch.uint8)
        return (image.float() / 255 - 0.5) / 0.25, index % 100


def batches(loader):
    while True:
        yield from loader


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    batch, size, images, width = (2, 32, 8, 0.25) if args.tiny else (args.batch, 64, 20_000, 1.0)

    loader = DataLoader(
        RandomImages(images, size),
        batch_size=batch,
        shuffle=True,
        drop_last=True,
        num_workers=0 if args.tiny else args.workers,
        persistent_workers=not args.tiny and args.workers > 0,
    )
    config = EfficientNetConfig(
        image_size=size,
        width_coefficient=width,
        depth_coefficient=1.0,
        hidden_dim=int(1280 * width),
        num_labels=100,
        problem_type="single_label_classification",
    )
    model = EfficientNetForImageClassification(config).to(args.device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    start, every = time.time(), max(1, args.steps // 20)
    for step, (image, label) in zip(range(1, args.steps + 1), batches(loader)):
        loss = model(pixel_values=image.to(args.device), labels=label.to(args.device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % every == 0 or step == args.steps:
            print(f"step {step}  loss {loss.item():.4f}  {time.time() - start:.2f} s", flush=True)


if __name__ == "__main__":
    main()
