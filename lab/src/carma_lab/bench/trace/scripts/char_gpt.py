"""A small GPT on characters, in bf16."""

import argparse
import math
import time

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x):
        batch, length, width = x.shape
        query, key, value = self.attention(self.norm1(x)).split(width, dim=2)
        shape = (batch, length, self.heads, width // self.heads)
        query, key, value = (part.view(shape).transpose(1, 2) for part in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(out.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, characters, block, width, layers, heads):
        super().__init__()
        self.token, self.position = nn.Embedding(characters, width), nn.Embedding(block, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters, bias=False)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(places))))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    batch, block, width, layers, heads = (2, 16, 16, 2, 2) if args.tiny else (args.batch, 256, 384, 6, 6)

    text = torch.randint(0, 96, (1000 if args.tiny else 1_000_000,), dtype=torch.uint8)
    model = GPT(96, block, width, layers, heads).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)

    start, every = time.time(), max(1, args.steps // 20)
    for step in range(1, args.steps + 1):
        lr = 1e-3 * min(step / 100, 0.5 + 0.5 * math.cos(math.pi * step / args.steps))
        for group in optimizer.param_groups:
            group["lr"] = lr
        begins = torch.randint(0, len(text) - block - 1, (batch,))
        chunk = torch.stack([text[begin : begin + block + 1] for begin in begins]).long().to(args.device)
        with torch.autocast(args.device, dtype=torch.bfloat16):
            scores = model(chunk[:, :-1])
            loss = F.cross_entropy(scores.flatten(0, 1), chunk[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % every == 0 or step == args.steps:
            print(f"step {step}  loss {loss.item():.4f}  {time.time() - start:.2f} s", flush=True)


if __name__ == "__main__":
    main()
