"""transformers models built from configurations, with random weights: nothing is downloaded."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import torch

# Name: configuration class, model class, kind of input, settings that differ from the configuration's defaults.
MODELS: dict[str, tuple[str, str, str, dict[str, Any]]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)


def make(name: str, args: argparse.Namespace) -> tuple[Any, Any, Any] | None:
    if name not in MODELS:
        return None
    importlib.import_module("models_vision").import_torchvision()  # transformers looks for it
    library = importlib.import_module("transformers")
    config_name, model_name, kind, settings = MODELS[name]
    settings = dict(settings)
    if kind in ("image", "segment") and hasattr(getattr(library, config_name)(), "image_size"):
        settings["image_size"] = args.size
    if kind in ("image", "segment"):
        settings["num_labels"] = 150 if kind == "segment" else 1000
    if kind in ("token", "classify", "few", "causal") and args.seq > 510:
        settings.setdefault("max_position_embeddings", 2048)
    if kind == "few":
        settings["num_labels"] = 9
    config = getattr(library, config_name)(**settings)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    model = getattr(library, model_name)(config)
    return model, lambda n: make_batch(kind, n, config, args), lambda model, batch: model(**batch).loss


def make_batch(kind: str, n: int, config: Any, args: argparse.Namespace) -> dict[str, Any]:
    match kind:
        case "image":
            return {"pixel_values": torch.randn(n, 3, args.size, args.size), "labels": torch.randint(0, 1000, (n,))}
        case "segment":
            labels = torch.randint(0, 150, (n, args.size, args.size))
            return {"pixel_values": torch.randn(n, 3, args.size, args.size), "labels": labels}
        case "speech":  # 30 s of 10 ms frames, which is what the encoder's positions are made for
            features = torch.randn(n, config.num_mel_bins, 2 * config.max_source_positions)
            return {"input_features": features, "labels": torch.randint(0, config.vocab_size, (n, min(args.seq, 440)))}
        case "audio":
            return {"input_values": torch.randn(n, args.size), "labels": torch.randint(0, 12, (n,))}
        case "pair":
            size = config.vision_config.image_size
            tokens = torch.randint(0, config.text_config.vocab_size, (n, 77))
            return {"input_ids": tokens, "pixel_values": torch.randn(n, 3, size, size), "return_loss": True}
        case _:
            return text_batch(kind, n, config, args)


def text_batch(kind: str, n: int, config: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens and labels; with padding, a mask of lengths from a half to the whole, and labels that skip the rest."""
    tokens = torch.randint(3, config.vocab_size - 1, (n, args.seq))
    batch = {"input_ids": tokens}
    mask = torch.ones_like(tokens)
    if args.padding:
        lengths = torch.randint(args.seq // 2, args.seq + 1, (n, 1))
        mask = (torch.arange(args.seq)[None, :] < lengths).long()
        batch["attention_mask"] = mask
    if kind == "classify":
        batch["labels"] = torch.randint(0, 2, (n,))
    elif kind == "few":
        batch["labels"] = torch.randint(0, 9, (n, args.seq)).masked_fill(mask == 0, -100)
    elif kind == "seq2seq":
        batch["labels"] = torch.randint(3, config.vocab_size - 1, (n, max(1, args.seq // 2)))
    else:
        batch["labels"] = tokens.masked_fill(mask == 0, -100)
    return batch
