"""A recommendation model after DLRM: embedding bags with sparse gradients, two perceptrons, dot interactions."""

import argparse
import time

import torch
from torch import nn


def perceptron(sizes):
    layers = []
    for inputs, outputs in zip(sizes, sizes[1:]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class DLRM(nn.Module):
    def __init__(self, rows, tables, width):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum", sparse=True) for _ in range(tables))
        self.bottom = perceptron([13, 512, 256, width])
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(perceptron([pairs + width, 512, 256]), nn.Linear(256, 1))
        places = torch.tril_indices(tables + 1, tables + 1, offset=-1)
        self.register_buffer("places", places)

    def forward(self, dense, sparse, offsets):
        bottom = self.bottom(dense)
        vectors = [bottom] + [bag(sparse[place], offsets) for place, bag in enumerate(self.bags)]
        stacked = torch.stack(vectors, dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        interactions = products[:, self.places[0], self.places[1]]
        return self.top(torch.cat([bottom, interactions], dim=1)).squeeze(1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    rows, tables, batch = (50, 4, 8) if args.tiny else (200_000, 12, args.batch)
    bag = 4

    model = DLRM(rows, tables, 32).to(args.device)
    dense_parameters = [*model.bottom.parameters(), *model.top.parameters()]
    optimizers = [
        torch.optim.SparseAdam(list(model.bags.parameters()), lr=1e-3),
        torch.optim.Adam(dense_parameters, lr=1e-3),
    ]
    lossfn = nn.BCEWithLogitsLoss()
    offsets = torch.arange(0, batch * bag, bag, device=args.device)

    start, every = time.time(), max(1, args.steps // 20)
    for step in range(1, args.steps + 1):
        dense = torch.rand(batch, 13, device=args.device)
        sparse = torch.randint(0, rows, (tables, batch * bag), device=args.device)
        clicks = (dense[:, 0] > 0.7).float()
        loss = lossfn(model(dense, sparse, offsets), clicks)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        if step % every == 0 or step == args.steps:
            print(f"step {step}  loss {loss.item():.4f}  {time.time() - start:.2f} s", flush=True)


if __name__ == "__main__":
    main()
