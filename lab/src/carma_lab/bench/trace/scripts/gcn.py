"""A graph network on one large graph: neighbours are averaged with a sparse matrix."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn


class GraphNetwork(nn.Module):
    def __init__(self, features, width, classes):
        super().__init__()
        self.own = nn.ModuleList([nn.Linear(features, width), nn.Linear(width, width), nn.Linear(width, classes)])
        self.near = nn.ModuleList([nn.Linear(features, width), nn.Linear(width, width), nn.Linear(width, classes)])

    def forward(self, x, sources, targets, degree):
        for place, (own, near) in enumerate(zip(self.own, self.near)):
            gathered = torch.zeros_like(x).index_add_(0, targets, x[sources]) / degree
            x = own(x) + near(gathered)
            if place < len(self.own) - 1:
                x = F.dropout(F.relu(x), 0.5, self.training)
        return x


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--nodes", type=int, default=50_000)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    nodes, edges, width = (60, 200, 8) if args.tiny else (args.nodes, 8 * args.nodes, 128)

    features = torch.randn(nodes, 64, device=args.device)
    labels = torch.randint(0, 40, (nodes,), device=args.device)
    sources = torch.randint(0, nodes, (edges,), device=args.device)
    targets = torch.randint(0, nodes, (edges,), device=args.device)
    degree = torch.zeros(nodes, 1, device=args.device)
    degree.index_add_(0, targets, torch.ones(edges, 1, device=args.device))
    degree.clamp_(min=1.0)
    train = torch.rand(nodes, device=args.device) < 0.6

    model = GraphNetwork(64, width, 40).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)

    start, every = time.time(), max(1, args.steps // 20)
    for step in range(1, args.steps + 1):
        model.train()
        scores = model(features, sources, targets, degree)
        losses = F.cross_entropy(scores, labels, reduction="none")
        loss = (losses * train).sum() / train.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % every == 0 or step == args.steps:
            print(f"step {step}  loss {loss.item():.4f}  {time.time() - start:.2f} s", flush=True)


if __name__ == "__main__":
    main()
