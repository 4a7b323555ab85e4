"""torchvision's models by name, with random weights: classification, segmentation, detection and video."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

import torch
import torch.nn.functional as F

CLASSES = 1000
SEGMENTS = 21


def make(name: str, args: argparse.Namespace) -> tuple[Any, Any, Any] | None:
    vision = importlib.import_module("models_vision").import_torchvision()
    if name in vision.models.list_models(vision.models.segmentation):
        model = vision.models.get_model(name, weights=None, weights_backbone=None, num_classes=SEGMENTS)
        return model, lambda n: segment_batch(n, args.size), segment_loss
    if name in vision.models.list_models(vision.models.detection):
        model = vision.models.get_model(name, weights=None, weights_backbone=None, num_classes=SEGMENTS)
        return model, lambda n: detect_batch(n, args.size), detect_loss
    if name in vision.models.list_models(vision.models.video):
        model = vision.models.get_model(name, weights=None, num_classes=400)
        return model, lambda n: (torch.randn(n, 3, 16, args.size, args.size), torch.randint(0, 400, (n,))), classify
    if name not in vision.models.list_models(vision.models):
        return None
    settings: dict[str, Any] = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    if name.startswith("vit_"):
        settings["image_size"] = args.size
    if name == "maxvit_t":
        settings["input_size"] = (args.size, args.size)
    model = vision.models.get_model(name, weights=None, **settings)
    return model, lambda n: image_batch(n, args.size), classify


def image_batch(n: int, size: int) -> tuple[Any, Any]:
    return torch.randn(n, 3, size, size), torch.randint(0, CLASSES, (n,))


def classify(model: Any, batch: Any) -> Any:
    images, labels = batch
    out = model(images)
    if isinstance(out, tuple):  # GoogLeNet and Inception answer with their auxiliary heads while they train
        loss = F.cross_entropy(out[0], labels)
        for extra in out[1:]:
            if extra is not None:
                loss = loss + 0.4 * F.cross_entropy(extra, labels)
        return loss
    return F.cross_entropy(out, labels)


def segment_batch(n: int, size: int) -> tuple[Any, Any]:
    return torch.randn(n, 3, size, size), torch.randint(0, SEGMENTS, (n, size, size))


def segment_loss(model: Any, batch: Any) -> Any:
    images, labels = batch
    out = model(images)
    loss = F.cross_entropy(out["out"], labels)
    if "aux" in out:
        loss = loss + 0.5 * F.cross_entropy(out["aux"], labels)
    return loss


def detect_batch(n: int, size: int) -> tuple[Any, Any]:
    """Images with four boxes each; the corners are ordered and no box is empty."""
    targets = []
    for _ in range(n):
        low = torch.rand(4, 2) * size * 0.5
        high = low + size * (0.1 + 0.3 * torch.rand(4, 2))
        targets.append({"boxes": torch.cat([low, high], 1), "labels": torch.randint(1, SEGMENTS, (4,))})
    return [torch.rand(3, size, size) for _ in range(n)], targets


def detect_loss(model: Any, batch: Any) -> Any:
    images, targets = batch
    losses = model(images, targets)
    return sum(losses.values())


DECLARED = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_kept: list[Any] = []  # a library's declarations live as long as the object


def import_torchvision() -> Any:
    """The torchvision package, with its operators declared if they are not."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for schema in DECLARED:
        library.define(schema)
    _kept.append(library)
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]  # a half imported package must not be found again
    return importlib.import_module("torchvision")
