"""One of the 18 published runs: `python published.py --model resnet50 --batch 32`.

Settings are those of the authors' scripts (itu-rad/CARMA, folder workloads, and itu-rad/GPUMemNet, Test_Pipeline):
fp32 with torch's defaults throughout; CNNs with Adam on ImageNet crops of 224 pixels, Inception with 299 and without
its second head; BERT and GPT-2 from scratch with AdamW on texts padded to 512 tokens; XLNet as a classifier of up to
512 tokens, with AdamW and gradients clipped to 1, as the Trainer does by default. The data is made up.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

TOKENS = 512
CLASSES = 1000
XLNET_BASE = {"d_model": 768, "n_layer": 12, "n_head": 12, "d_inner": 3072}
BERT_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
IMAGES = ("vgg16", "resnet50", "mobilenet_v2", "efficientnet_b0", "inception_v3", "xception")
# name: configuration class, model class, settings away from the configuration's defaults
TEXTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert-base": ("BertConfig", "BertForMaskedLM", {"vocab_size": 28996}),
    "bert-large": ("BertConfig", "BertForMaskedLM", {"vocab_size": 28996, **BERT_LARGE}),
    "xlnet-base": ("XLNetConfig", "XLNetForSequenceClassification", XLNET_BASE),
    "xlnet-large": ("XLNetConfig", "XLNetForSequenceClassification", {}),
    "gpt2-large": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 1280, "n_layer": 36, "n_head": 20}),
    "gpt2-xl": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
}


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Trains one of the published models on made-up data.")
    parser.add_argument("--model", required=True, choices=(*IMAGES, *TEXTS))
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--device", default="cuda")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = options().parse_args(argv)
    if args.model in IMAGES:
        train_images(args)
    else:
        train_texts(args)
    return 0


def image_model(name: str) -> Any:
    if name == "xception":
        return importlib.import_module("models_xception").Xception(CLASSES)
    settings = {"aux_logits": False, "init_weights": False} if name == "inception_v3" else {}
    return (
        importlib.import_module("models_vision").import_torchvision().models.get_model(name, weights=None, **settings)
    )


def train_images(args: argparse.Namespace) -> None:
    import torch

    model = image_model(args.model).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    size = 299 if args.model == "inception_v3" else 224
    model.train()
    for step in range(args.steps):
        images = torch.randn(args.batch, 3, size, size).to(args.device)
        labels = torch.randint(0, CLASSES, (args.batch,)).to(args.device)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        print(f"step {step + 1} loss {loss.item():.4f}", flush=True)


def train_texts(args: argparse.Namespace) -> None:
    import torch

    importlib.import_module("models_vision").import_torchvision()  # transformers looks for it
    library = importlib.import_module("transformers")
    config_name, model_name, settings = TEXTS[args.model]
    model = getattr(library, model_name)(getattr(library, config_name)(**settings)).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model.train()
    for step in range(args.steps):
        batch = text_batch(args.model, args.batch, model.config.vocab_size)
        loss = model(**{name: tensor.to(args.device) for name, tensor in batch.items()}).loss
        loss.backward()
        if args.model.startswith("xlnet"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1} loss {loss.item():.4f}", flush=True)


def text_batch(model: str, n: int, vocabulary: int) -> dict[str, Any]:
    """Texts of different lengths, padded; one is as long as can be, so that XLNet's batches are that long too."""
    import torch

    tokens = torch.randint(3, vocabulary - 1, (n, TOKENS))
    lengths = torch.randint(16, TOKENS + 1, (n, 1))
    lengths[0] = TOKENS
    mask = (torch.arange(TOKENS)[None, :] < lengths).long()
    if model.startswith("xlnet"):
        labels = torch.ones(n, dtype=torch.long)
    elif model.startswith("bert"):
        labels = tokens.masked_fill(torch.rand(n, TOKENS) > 0.15, -100)
    else:
        labels = tokens
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


if __name__ == "__main__":
    sys.exit(main())
