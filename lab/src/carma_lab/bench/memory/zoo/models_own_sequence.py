# mypy: disallow-subclassing-any=False
"""Recurrent models: language models, a bidirectional classifier, an encoder and decoder with attention."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WORDS = 20000
SERIES = 16


class Recurrent(nn.Module):
    """A language model over words, with LSTM or GRU layers and dropout between them."""

    def __init__(self, kind: str, width: int, layers: int, tied: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        cell = nn.LSTM if kind == "lstm" else nn.GRU
        self.rnn = cell(width, width, layers, dropout=0.2 if layers > 1 else 0.0, batch_first=True)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(width, WORDS)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Any) -> Any:
        out, _ = self.rnn(self.drop(self.words(tokens)))
        return self.head(self.drop(out))


def word_loss(model: Any, batch: Any) -> Any:
    tokens = batch[0]
    out = model(tokens[:, :-1])
    return F.cross_entropy(out.reshape(-1, out.shape[-1]), tokens[:, 1:].reshape(-1))


class Classifier(nn.Module):
    """Both directions over sequences of different lengths; the last outputs, joined, give the class."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 300, padding_idx=0)
        self.rnn = nn.LSTM(300, width, layers, dropout=0.2, bidirectional=True, batch_first=True)
        self.head = nn.Sequential(nn.Linear(4 * width, width), nn.ReLU(), nn.Dropout(0.5), nn.Linear(width, 5))

    def forward(self, tokens: Any) -> Any:
        out, _ = self.rnn(self.words(tokens))
        return self.head(torch.cat([out.mean(1), out.amax(1)], dim=1))


class Series(nn.Module):
    """A forecaster of many-valued time series: a GRU with projections on both sides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.start = nn.Linear(SERIES, width)
        self.rnn = nn.GRU(width, width, 2, batch_first=True)
        self.end = nn.Linear(width, SERIES)

    def forward(self, x: Any) -> Any:
        return self.end(self.rnn(F.relu(self.start(x)))[0])


class Translator(nn.Module):
    """An LSTM encoder, and a decoder that looks back at it with one head of attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, width), nn.Embedding(WORDS, width)
        self.encoder = nn.LSTM(width, width // 2, 2, bidirectional=True, batch_first=True)
        self.decoder = nn.LSTM(width, width, 2, batch_first=True)
        self.join, self.head = nn.Linear(2 * width, width), nn.Linear(width, WORDS)

    def forward(self, source: Any, target: Any) -> Any:
        memory, _ = self.encoder(self.source(source))
        out, _ = self.decoder(self.target(target))
        weights = torch.softmax(torch.bmm(out, memory.transpose(1, 2)) / memory.shape[-1] ** 0.5, dim=-1)
        return self.head(torch.tanh(self.join(torch.cat([out, torch.bmm(weights, memory)], dim=-1))))


def translate_loss(model: Any, batch: Any) -> Any:
    source, target = batch
    out = model(source, target[:, :-1])
    return F.cross_entropy(out.flatten(0, 1), target[:, 1:].flatten(), label_smoothing=0.1)


def padded(n: int, length: int) -> Any:
    """Words, with zeros after each sequence's own length."""
    tokens = torch.randint(1, WORDS, (n, length))
    lengths = torch.randint(length // 2, length + 1, (n, 1))
    return tokens.masked_fill(torch.arange(length)[None, :] >= lengths, 0)


def make(name: str, args: argparse.Namespace) -> tuple[Any, Any, Any] | None:
    length = args.seq

    def words(n: int) -> Any:
        return [torch.randint(0, WORDS, (n, length + 1))]

    match name:
        case "own-lstm-1" | "own-lstm-2" | "own-lstm-4":
            return Recurrent("lstm", 1024, int(name[-1]), tied=False), words, word_loss
        case "own-gru-1" | "own-gru-3":
            return Recurrent("gru", 768, int(name[-1]), tied=True), words, word_loss
        case "own-bilstm":
            return Classifier(512, 2), lambda n: (padded(n, length), torch.randint(0, 5, (n,))), classify
        case "own-series":
            return Series(512), lambda n: (torch.randn(n, length, SERIES), torch.randn(n, length, SERIES)), forecast
        case "own-translator":
            return Translator(512), lambda n: (padded(n, length), padded(n, length)), translate_loss
        case _:
            return None


def classify(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch[0]), batch[1])


def forecast(model: Any, batch: Any) -> Any:
    return F.smooth_l1_loss(model(batch[0]), batch[1])
