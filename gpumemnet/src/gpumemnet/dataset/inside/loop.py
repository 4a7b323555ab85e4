"""Trains a config's model in an ordinary loop, as users write it. Standard library and torch only.

Weights are built without memory and then filled on the device from one buffer of random numbers. The allocator is then
in the same state as after `model.to("cuda")`, without the seconds that drawing a billion random numbers takes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import build
import torch
from torch.nn import functional as F

BUFFER = 1 << 22  # random numbers
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, weight_decay=1e-4),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-5),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-5),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-5),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-5),
}


def random_numbers() -> Any:
    return torch.randn(BUFFER, generator=torch.Generator().manual_seed(0)) * 0.02


def make(config: dict[str, Any], numbers: Any) -> tuple[Any, Any]:
    """The parts of a run that need no device: the model without memory, and the batch on the CPU."""
    model = build.build(config)
    if config.get("precision") == "bf16":
        model = model.bfloat16()
    if config.get("channels_last"):
        model = model.to(memory_format=torch.channels_last)
    return model, make_batch(config, numbers)


class Training:
    """A model with its optimizer on a device. Each `step` is one step of the optimizer."""

    def __init__(self, config: dict[str, Any], device: str, numbers: Any, made: tuple[Any, Any] | None = None) -> None:
        self.config, self.device = config, device
        precision = config.get("precision", "fp32")
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"  # else torch's defaults
        model, self.batch = made or make(config, numbers)
        self.model = model = to_device(model, device).train()
        fill(model, numbers)
        self.optimizer = OPTIMIZERS[config.get("optimizer", "adam")](list(model.parameters()))
        # This scale never overflows; a skipped step would leave the optimizer without its state.
        self.scaler = torch.amp.GradScaler(torch.device(device).type, 1.0, enabled=precision == "fp16-amp")
        self.stepped = 0  # steps that the optimizer did not skip

    def step(self) -> float:
        inputs, target = [self._moved(tensor) for tensor in self.batch[0]], self.batch[1].to(self.device)
        with self._autocast():
            output = self.model(*inputs)
            loss = loss_of(self.config, output, target)
        value = float(loss.item())
        self.scaler.scale(loss).backward()
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.stepped += self.scaler.get_scale() >= scale
        self.optimizer.zero_grad(set_to_none=True)
        return value

    def _autocast(self) -> Any:
        kind = {"bf16-amp": torch.bfloat16, "fp16-amp": torch.float16}.get(self.config.get("precision", "fp32"))
        return torch.autocast(torch.device(self.device).type, dtype=kind) if kind else contextlib.nullcontext()

    def _moved(self, tensor: Any) -> Any:
        moved = tensor.to(self.device)
        flips = self.config.get("channels_last") and tensor.ndim == 4
        return moved.to(memory_format=torch.channels_last) if flips else moved


def make_batch(config: dict[str, Any], numbers: Any) -> tuple[list[Any], Any]:
    """A batch on the CPU, as from a data loader."""
    count, shape = config["batch"], config["input"]
    if config.get("vocabulary"):
        inputs = [torch.randint(config["vocabulary"], (count, *shape))]
    else:
        inputs = [drawn(numbers, (count, *shape)) * 50]
        if config.get("precision") == "bf16":
            inputs = [inputs[0].bfloat16()]
    if config.get("target"):
        inputs.append(torch.randint(config["outputs"], (count, config["target"])))
    length = config.get("target") or shape[0]
    match config.get("loss", "classes"):
        case "tokens":
            return inputs, torch.randint(config["outputs"], (count, length))
        case "pixels":
            return inputs, torch.randint(config["outputs"], (count, *shape[1:]))
        case "values":
            return inputs, drawn(numbers, (count, config["outputs"]))
        case _:
            return inputs, torch.randint(config["outputs"], (count,))


def to_device(model: Any, device: str) -> Any:
    """Moves the model as `model.to(device)` does: shared weights are moved once and stay shared, while `to_empty` alone
    separates them."""
    owners: dict[Any, list[tuple[Any, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(parameter, []).append((module, name))
    for _, *others in owners.values():
        for module, name in others:
            setattr(module, name, None)  # so that `to_empty` allocates nothing for it
    moved = model.to_empty(device=device)
    for (first, its), *others in owners.values():
        for module, name in others:
            setattr(module, name, getattr(first, its))
    return moved


def loss_of(config: dict[str, Any], output: Any, target: Any) -> Any:
    match config.get("loss", "classes"):
        case "values":
            return F.mse_loss(output.float(), target)
        case "tokens":
            return F.cross_entropy(output.flatten(0, 1), target.flatten())
        case _:
            return F.cross_entropy(output, target)


def drawn(numbers: Any, shape: tuple[int, ...]) -> Any:
    wanted = torch.Size(shape).numel()
    whole = numbers.repeat(wanted // BUFFER + 1) if wanted > BUFFER else numbers
    return whole[:wanted].view(shape)


def fill(model: Any, numbers: Any) -> None:
    """Small random weights, norms at one, and valid running statistics, so that losses stay finite."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                flat = parameter.data.as_strided((parameter.numel(),), (1,))  # whatever its memory format
                for begin in range(0, flat.numel(), BUFFER):
                    part = flat[begin : begin + BUFFER]
                    part.copy_(numbers[: part.numel()])
            else:
                parameter.copy_(torch.full(parameter.shape, 0.0 if name.endswith("bias") else 1.0))
        for name, buffer in model.named_buffers():
            buffer.copy_(torch.full(buffer.shape, 1.0 if name.endswith("var") else 0.0).to(buffer.dtype))
