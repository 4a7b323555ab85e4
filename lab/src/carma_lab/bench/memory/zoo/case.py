"""One training case: `python case.py --model resnet50 --batch 32 --optimizer adamw --precision bf16-amp`.

An ordinary training loop, as users write it. The same file is run on a GPU for the truth and traced without one for
the estimate, so it asks nothing about memory. torch is imported inside, so that the options can be read without it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import sys
from typing import Any

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 1e-3}),
    "momentum": ("SGD", {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-4}),
    "adam": ("Adam", {"lr": 1e-4}),
    "adamw": ("AdamW", {"lr": 1e-4}),
    "adamw-fused": ("AdamW", {"lr": 1e-4, "fused": True}),
    "adamw-loop": ("AdamW", {"lr": 1e-4, "foreach": False}),
    "rmsprop": ("RMSprop", {"lr": 1e-4}),
    "adagrad": ("Adagrad", {"lr": 1e-3}),
}
PRECISIONS = ("fp32", "strict", "tf32", "bf16-amp", "fp16-amp", "bf16")
OWN = ("models_own_conv", "models_own_image", "models_own_sequence", "models_own_attention", "models_own_table")


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Trains one model on made-up data for a few steps.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=224, help="side of an image, or length of a signal")
    parser.add_argument("--seq", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--padding", action="store_true", help="sequences of different lengths, with a mask")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--checkpoint", action="store_true", help="compute activations again in the backward pass")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--eval-batch", type=int, default=0, help="after each second step, a pass without gradients")
    parser.add_argument("--benchmark", action="store_true", help="let cuDNN try its algorithms")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def make(name: str, args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """The model on the CPU, a function that makes a batch there, and the loss (or a list of parts with their own)."""
    if name.startswith("hf-"):
        modules: tuple[str, ...] = ("models_hf",)
    elif name.startswith("own-"):
        modules = OWN
    else:
        modules = ("models_vision",)
    for module in modules:
        made = importlib.import_module(module).make(name, args)
        if made is not None:
            model, make_batch, loss_fn = made
            return model, make_batch, loss_fn
    raise SystemExit(f"no model named {name}")


def make_optimizer(name: str, parameters: list[Any]) -> Any:
    import torch

    kind, settings = OPTIMIZERS[name]
    return getattr(torch.optim, kind)(parameters, **settings)


def set_precision(precision: str) -> None:
    """fp32 leaves torch's defaults: TF32 for convolutions, none for matrix products."""
    import torch

    if precision in ("strict", "tf32"):
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"


def autocast(args: argparse.Namespace) -> Any:
    import torch

    if not args.precision.endswith("-amp"):
        return contextlib.nullcontext()
    half = torch.bfloat16 if args.precision == "bf16-amp" else torch.float16
    return torch.autocast(args.device.split(":")[0], dtype=half)


def moved(batch: Any, args: argparse.Namespace) -> Any:
    """The batch on the device, in the model's number type and memory format."""
    import torch

    if isinstance(batch, dict):
        return {key: moved(value, args) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [moved(value, args) for value in batch]
    if not isinstance(batch, torch.Tensor):
        return batch
    if args.precision == "bf16" and batch.is_floating_point():
        batch = batch.to(torch.bfloat16)
    if args.channels_last and batch.dim() == 4:
        return batch.to(args.device, non_blocking=True, memory_format=torch.channels_last)
    return batch.to(args.device, non_blocking=True)


def checkpoint_blocks(model: Any) -> None:
    """Wraps the repeated blocks of a model: the members of its outermost lists that have members themselves."""
    import torch
    from torch.utils.checkpoint import checkpoint

    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    for part in model.children():
        blocks = [block for block in part.children() if len(list(block.children())) > 1]
        if isinstance(part, (torch.nn.Sequential, torch.nn.ModuleList)) and blocks:
            for block in blocks:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        else:
            checkpoint_blocks(part)


def prepare(args: argparse.Namespace, model: Any) -> None:
    import torch

    model.train()
    if args.checkpoint:
        checkpoint_blocks(model)
    if args.precision == "bf16":
        model.bfloat16()
    model.to(args.device)
    if args.channels_last:
        model.to(memory_format=torch.channels_last)


def train(args: argparse.Namespace, model: Any, make_batch: Any, parts: list[tuple[Any, Any]]) -> None:
    import torch

    optimizers = [make_optimizer(args.optimizer, list(part.parameters())) for part, _ in parts]
    scaler = torch.amp.GradScaler(args.device.split(":")[0], enabled=args.precision == "fp16-amp")
    for step in range(args.steps):
        for turn in range(args.accumulate):
            batch = moved(make_batch(args.batch), args)
            for (part, loss_fn), optimizer in zip(parts, optimizers, strict=True):
                with autocast(args):
                    loss = loss_fn(model, batch)
                scaler.scale(loss / args.accumulate).backward()
                if turn + 1 == args.accumulate:
                    if args.clip:
                        scaler.unscale_(optimizer)
                        torch.nn.utils.clip_grad_norm_(part.parameters(), args.clip)
                    scaler.step(optimizer)
                    optimizer.zero_grad(set_to_none=True)
            total = loss.item()
        scaler.update()
        print(f"step {step + 1} loss {total:.4f}", flush=True)
        if args.eval_batch and step % 2 == 1:
            evaluate(args, model, make_batch, parts)


def evaluate(args: argparse.Namespace, model: Any, make_batch: Any, parts: list[tuple[Any, Any]]) -> None:
    import torch

    model.eval()
    with torch.no_grad(), autocast(args):
        batch = moved(make_batch(args.eval_batch), args)
        print(f"eval loss {parts[0][1](model, batch).item():.4f}", flush=True)
    model.train()


def main(argv: list[str] | None = None) -> int:
    args = options().parse_args(argv)
    import torch

    torch.manual_seed(args.seed)
    set_precision(args.precision)
    torch.backends.cudnn.benchmark = args.benchmark
    model, make_batch, loss_fn = make(args.model, args)
    prepare(args, model)
    train(args, model, make_batch, loss_fn if isinstance(loss_fn, list) else [(model, loss_fn)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
