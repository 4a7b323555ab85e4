# mypy: disallow-subclassing-any=False
"""Models over tables and graphs: MLPs, a DLRM-like click model, a recommender, message passing."""

from __future__ import annotations

import argparse
import itertools
import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

FEATURES = 784
TABLES = 26


def mlp(widths: list[int], norm: bool = False) -> Any:
    layers: list[Any] = []
    for ins, outs in itertools.pairwise(widths):
        layers += [nn.Linear(ins, outs), *([nn.BatchNorm1d(outs)] if norm else []), nn.ReLU(inplace=True)]
        if norm:
            layers.append(nn.Dropout(0.2))
    return nn.Sequential(*layers[: -3 if norm else -1])


class Clicks(nn.Module):
    """Dense features through an MLP, sparse ones through embedding bags, their pairwise products on top."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(TABLES))
        self.below = mlp([13, 512, 256, width])
        pairs = (TABLES + 1) * TABLES // 2
        self.above = mlp([pairs + width, 1024, 1024, 512, 256, 1])
        rows_of, columns_of = torch.tril_indices(TABLES + 1, TABLES + 1, offset=-1)
        self.register_buffer("rows_of", rows_of)
        self.register_buffer("columns_of", columns_of)

    def forward(self, dense: Any, sparse: Any) -> Any:
        x = self.below(dense)
        stack = torch.stack([x, *[bag(sparse[i]).to(x.dtype) for i, bag in enumerate(self.bags)]], dim=1)
        products = torch.bmm(stack, stack.transpose(1, 2))
        return self.above(torch.cat([x, products[:, self.rows_of, self.columns_of]], dim=1)).squeeze(1)


class Recommender(nn.Module):
    """Neural collaborative filtering: a product of factors beside an MLP over other factors."""

    def __init__(self, people: int, things: int, width: int) -> None:
        super().__init__()
        self.people1, self.people2 = nn.Embedding(people, width), nn.Embedding(people, width)
        self.things1, self.things2 = nn.Embedding(things, width), nn.Embedding(things, width)
        self.mlp = mlp([2 * width, 1024, 512, width])
        self.head = nn.Linear(2 * width, 1)

    def forward(self, person: Any, thing: Any) -> Any:
        product = self.people1(person) * self.things1(thing)
        deep = self.mlp(torch.cat([self.people2(person), self.things2(thing)], dim=-1))
        return self.head(torch.cat([product, deep], dim=-1)).squeeze(-1)


class Messages(nn.Module):
    """Each node adds up what its neighbours say; every second layer takes the largest instead."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.start = nn.Linear(64, width)
        self.say = nn.ModuleList(nn.Sequential(nn.Linear(2 * width, width), nn.ReLU()) for _ in range(layers))
        self.hear = nn.ModuleList(nn.GRUCell(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 40)

    def forward(self, nodes: Any, edges: Any) -> Any:
        x, (source, target) = self.start(nodes), edges
        for number, (say, hear) in enumerate(zip(self.say, self.hear, strict=True)):
            said = say(torch.cat([x[source], x[target]], dim=1))
            if number % 2:
                places = target[:, None].expand_as(said)
                heard = torch.zeros_like(x, dtype=said.dtype).scatter_reduce(0, places, said, "amax")
            else:
                heard = torch.zeros_like(x, dtype=said.dtype).index_add(0, target, said)
            x = hear(heard, x)
        return self.head(x)


def graph_batch(n: int, degree: int) -> tuple[Any, Any, Any]:
    """A batch of n thousand nodes with `degree` neighbours each."""
    nodes = n * 1000
    return torch.randn(nodes, 64), torch.randint(0, nodes, (2, nodes * degree)), torch.randint(0, 40, (nodes,))


def click_batch(n: int, rows: int) -> tuple[Any, Any, Any]:
    return torch.randn(n, 13), torch.randint(0, rows, (TABLES, n, 4)), torch.randint(0, 2, (n,)).float()


def make(name: str, _args: argparse.Namespace) -> tuple[Any, Any, Any] | None:
    bce = F.binary_cross_entropy_with_logits
    shape = re.fullmatch(r"own-mlp(-norm)?-(\d+)x(\d+)", name)
    if shape:
        widths = [FEATURES, *[int(shape[3])] * int(shape[2]), 10]
        batch = lambda n: (torch.randn(n, FEATURES), torch.randint(0, 10, (n,)))  # noqa: E731
        return mlp(widths, norm=bool(shape[1])), batch, lambda m, b: F.cross_entropy(m(b[0]), b[1])
    match name:
        case "own-dlrm" | "own-dlrm-large":
            rows, width = (100_000, 64) if name == "own-dlrm" else (200_000, 128)
            return Clicks(rows, width), lambda n: click_batch(n, rows), lambda m, b: bce(m(b[0], b[1]), b[2])
        case "own-ncf":
            people, things = 500_000, 100_000
            model = Recommender(people, things, 128)
            pairs = lambda n: (torch.randint(0, people, (n,)), torch.randint(0, things, (n,)), torch.rand(n))  # noqa: E731
            return model, pairs, lambda m, b: bce(m(b[0], b[1]), b[2])
        case "own-graph":
            return Messages(256, 4), lambda n: graph_batch(n, 8), lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2])
        case _:
            return None
