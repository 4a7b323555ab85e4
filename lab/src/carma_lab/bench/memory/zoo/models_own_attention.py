# mypy: disallow-subclassing-any=False
"""Transformers written by hand or from torch.nn's own layers, and the mixer that does without attention."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

TOKENS = 32000


class Causal(nn.Module):
    """Attention and a feed-forward net, both after their norm, as in small GPT code."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Any) -> Any:
        n, length, width = x.shape
        shape = (n, length, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(self.norm2(x))


class NanoGpt(nn.Module):
    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(TOKENS, width), nn.Embedding(2048, width)
        self.blocks = nn.ModuleList(Causal(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, TOKENS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Any) -> Any:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_loss(model: Any, batch: Any) -> Any:
    out = model(batch[0][:, :-1])
    return F.cross_entropy(out.view(-1, out.shape[-1]), batch[0][:, 1:].reshape(-1))


class Encoder(nn.Module):
    """nn.TransformerEncoder over tokens, with a padding mask where there is padding."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, batch_first=True, activation="gelu")
        self.words, self.places = nn.Embedding(TOKENS, width), nn.Embedding(2048, width)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 20)

    def forward(self, tokens: Any, padding: bool) -> Any:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        mask = tokens == 0 if padding else None
        return self.head(self.encoder(x, src_key_padding_mask=mask).mean(1))


class Pair(nn.Module):
    """nn.Transformer between two token sequences, the second masked to its past."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(TOKENS, width), nn.Embedding(2048, width)
        self.body = nn.Transformer(width, 8, layers, layers, 4 * width, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, TOKENS)

    def embed(self, tokens: Any) -> Any:
        return self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))

    def forward(self, source: Any, target: Any) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        mask = mask.to(self.head.weight.dtype)
        return self.head(self.body(self.embed(source), self.embed(target), tgt_mask=mask, tgt_is_causal=True))


def pair_loss(model: Any, batch: Any) -> Any:
    out = model(batch[0], batch[1][:, :-1])
    return F.cross_entropy(out.flatten(0, 1), batch[1][:, 1:].flatten())


class Mix(nn.Module):
    """One mixer layer: over the patches, then over the channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(nn.Linear(patches, width // 2), nn.GELU(), nn.Linear(width // 2, patches))
        self.along = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Any) -> Any:
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.along(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, size: int, width: int, layers: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.blocks = nn.Sequential(*[Mix((size // 16) ** 2, width) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: Any) -> Any:
        return self.head(self.norm(self.blocks(self.patch(x).flatten(2).transpose(1, 2))).mean(1))


def classify(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch[0]), batch[1])


def make(name: str, args: argparse.Namespace) -> tuple[Any, Any, Any] | None:
    length = args.seq

    def tokens(n: int, extra: int = 1) -> Any:
        return torch.randint(1, TOKENS, (n, length + extra))

    def padded(n: int) -> Any:
        lengths = torch.randint(length // 2, length + 1, (n, 1))
        return tokens(n, 0).masked_fill((torch.arange(length)[None, :] >= lengths) & args.padding, 0)

    match name:
        case "own-nanogpt" | "own-nanogpt-medium":
            model = NanoGpt(768, 12, 12) if name == "own-nanogpt" else NanoGpt(1024, 24, 16)
            return model, lambda n: [tokens(n)], next_loss
        case "own-encoder":
            batch = lambda n: (padded(n), torch.randint(0, 20, (n,)))  # noqa: E731
            return Encoder(768, 8), batch, lambda m, b: F.cross_entropy(m(b[0], args.padding), b[1])
        case "own-pair":
            return Pair(512, 6), lambda n: (tokens(n, 0), tokens(n)), pair_loss
        case "own-mixer":
            images = lambda n: (torch.randn(n, 3, args.size, args.size), torch.randint(0, 1000, (n,)))  # noqa: E731
            return Mixer(args.size, 768, 12), images, classify
        case _:
            return None
