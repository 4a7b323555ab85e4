"""A multilayer perceptron on a table of numbers, with batch normalisation and dropout."""

import argparse
import time

import torch
from torch import nn


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    rows, batch, hidden = (64, 8, 16) if args.tiny else (200_000, args.batch, args.hidden)

    features = torch.randn(rows, 200)
    targets = torch.tanh(features[:, :8].sum(1, keepdim=True)) + 0.1 * torch.randn(rows, 1)
    mean, std = features.mean(0), features.std(0)
    features = ((features - mean) / std).to(args.device)
    targets = targets.to(args.device)

    layers, inputs = [], 200
    for _ in range(args.layers):
        layers += [nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.GELU(), nn.Dropout(0.1)]
        inputs = hidden
    model = nn.Sequential(*layers, nn.Linear(inputs, 1)).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    lossfn = nn.SmoothL1Loss()

    start, every = time.time(), max(1, args.steps // 20)
    for step in range(1, args.steps + 1):
        chosen = torch.randint(0, rows, (batch,), device=args.device)
        loss = lossfn(model(features[chosen]), targets[chosen])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % every == 0 or step == args.steps:
            print(f"step {step}  loss {loss.item():.4f}  {time.time() - start:.2f} s", flush=True)


if __name__ == "__main__":
    main()
