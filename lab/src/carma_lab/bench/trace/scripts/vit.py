"""A vision transformer (ViT-S/16) on images of 224 pixels, bf16."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn


class VisionTransformer(nn.Module):
    def __init__(self, size, patch, width, layers, heads, classes):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2 + 1, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.position
        return self.head(self.encoder(x)[:, 0])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    if args.tiny:
        batch, size, images, shape = 2, 32, 4, (16, 1, 2)
    else:
        batch, size, images, shape = args.batch, 224, 512, (384, 12, 6)

    data, labels = torch.randn(images, 3, size, size), torch.randint(0, 1000, (images,))
    model = VisionTransformer(size, 16, *shape, classes=1000).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-4, total_steps=args.steps + 1)

    start, every = time.time(), max(1, args.steps // 20)
    for step in range(1, args.steps + 1):
        chosen = torch.randint(0, images, (batch,))
        image, label = data[chosen].to(args.device), labels[chosen].to(args.device)
        with torch.autocast(args.device, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(image), label)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % every == 0 or step == args.steps:
            print(f"step {step}  loss {loss.item():.4f}  {time.time() - start:.2f} s", flush=True)


if __name__ == "__main__":
    main()
