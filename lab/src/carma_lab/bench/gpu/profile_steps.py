"""One training step of each published task, with made-up data that lies on the device already.

Precision, optimizer and loss are those of the authors' scripts: fp32 with torch's defaults (TF32 in convolutions, not
in matrix products). The learning rate is next to nothing, so that models that begin with random weights stay finite; a
step costs the same. What a step costs does not depend on the texts' padding either, so no sample is padded.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from carma_lab.bench.gpu import profile_models as own
from carma_lab.bench.gpu.profile_tasks import Task
from carma_lab.bench.memory.zoo.published import TEXTS

Launch = Callable[[], Any]  # enqueues a step; gives the loss, which is not waited for
RATE = 1e-7
CLASSES = 1000
TEXT = 512  # tokens, to which BERT's and GPT-2's texts are padded
# XLNet's batches are as long as their longest line. Memory follows the longest of all; time follows the usual one, set
# here so that the arithmetic of a step fits the published time of one (no length was published).
USUAL = {"xlnet-base": 256, "xlnet-large": 192}
TABLE_ROWS = 20_000  # of each of DLRM's tables; the memory is then the published one
DEPTH = {"bert": "num_hidden_layers", "gpt2": "n_layer", "xlnet": "n_layer"}  # the setting that is the depth
IMAGES = {
    "vgg16": "vgg16",
    "resnet50": "resnet50",
    "efficientnet": "efficientnet_b0",
    "mobilenet": "mobilenet_v2",
    "inception": "inception_v3",
}
SMALL_IMAGES = {
    "resnet18-cifar": "resnet18",
    "resnet34-cifar": "resnet34",
    "efficientnet-cifar": "efficientnet_b0",
    "mobilenet-cifar": "mobilenet_v3_small",
}


class Steps(NamedTuple):
    usual: Launch
    largest: Launch  # what takes the most memory of a run; mostly the same


class Place(NamedTuple):
    device: str
    tiny: bool = False  # for a machine without a GPU: a few samples, small ones, shallow models


def build(task: Task, place: Place) -> Steps:
    """The model and its data on the device. Weights are drawn there: on a processor it would take many seconds."""
    with torch.device(place.device):
        if task.model in TEXTS:
            return _texts(task, place)
        launch = _SPECIAL.get(task.model, _classify)(task, place)
    return Steps(launch, launch)


def _vision() -> Any:
    return importlib.import_module("carma_lab.bench.memory.zoo.models_vision").import_torchvision()


def _trained(model: Any, optimizer: Any, loss: Callable[[], Any], *, clips: bool = False) -> Launch:
    model.train()

    def launch() -> Any:
        optimizer.zero_grad()
        cost = loss()
        cost.backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return cost

    return launch


def _batch(task: Task, place: Place) -> int:
    return min(task.batch, 2) if place.tiny else task.batch


def _classify(task: Task, place: Place) -> Launch:
    """ImageNet with Adam, CIFAR-100 with AdamW; CIFAR's images go as they are through models for large ones."""
    n, small = _batch(task, place), task.model in SMALL_IMAGES
    classes, size = (100, 32) if small else (CLASSES, 224)
    if task.model == "xception":
        model = importlib.import_module("carma_lab.bench.memory.zoo.models_xception").Xception(classes)
    else:
        extra = {"aux_logits": False, "init_weights": False} if task.model == "inception" else {}
        name = SMALL_IMAGES[task.model] if small else IMAGES[task.model]
        model = _vision().models.get_model(name, weights=None, num_classes=classes, **extra)
    if task.model == "inception":
        size = 299
    if place.tiny and not small:
        size = 96
    kind = torch.optim.AdamW if small else torch.optim.Adam
    images, labels = torch.randn(n, 3, size, size), torch.randint(0, classes, (n,))
    optimizer = kind(model.parameters(), lr=RATE)
    return _trained(model, optimizer, lambda: F.cross_entropy(model(images), labels))


def _unet(task: Task, place: Place) -> Launch:
    n, size = _batch(task, place), 64 if place.tiny else 512
    model = own.UNet(_vision().models.resnet34(weights=None))
    images, wanted = torch.rand(n, 3, size, size), torch.randint(0, own.SEGMENTS, (n, size, size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    return _trained(model, optimizer, lambda: own.dice_loss(model(images), wanted))


def _maskrcnn(task: Task, place: Place) -> Launch:
    """Photographs of the usual size of COCO's, seven things in each; the model enlarges them to 800 pixels itself."""
    n, height, width = _batch(task, place), 480, 640
    smaller: dict[str, Any] = {"min_size": 96, "max_size": 128} if place.tiny else {}
    detection = _vision().models.detection
    model = detection.maskrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=91, **smaller)
    images = [torch.rand(3, height, width) for _ in range(n)]
    targets = [_things(7, height, width) for _ in range(n)]
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=1e-4)
    return _trained(model, optimizer, lambda: sum(model(images, targets).values()))


def _things(count: int, height: int, width: int) -> dict[str, Any]:
    """Boxes with their masks; corners are in order and no box is empty."""
    extent = torch.tensor([width, height])
    low = torch.rand(count, 2) * 0.6 * extent
    high = low + (0.05 + 0.3 * torch.rand(count, 2)) * extent
    boxes = torch.cat([low, high], 1)
    across, down = torch.arange(width)[None, None, :], torch.arange(height)[None, :, None]
    x0, y0, x1, y1 = (boxes[:, place, None, None] for place in range(4))
    masks = (across >= x0) & (across <= x1) & (down >= y0) & (down <= y1)
    return {"boxes": boxes, "labels": torch.randint(1, 91, (count,)), "masks": masks.to(torch.uint8)}


def _dlrm(task: Task, place: Place) -> Launch:
    n, rows = (64, 100) if place.tiny else (task.batch, TABLE_ROWS)
    model = own.Dlrm(rows)
    figures, places, starts = torch.rand(n, own.DENSE), torch.randint(0, rows, (own.TABLES, n)), torch.arange(n)
    wanted = torch.randint(0, 2, (n,)).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    return _trained(model, optimizer, lambda: F.binary_cross_entropy(model(figures, places, starts), wanted))


def _mnist(task: Task, place: Place) -> Launch:
    n = _batch(task, place)
    model = own.mnist()
    images, labels = torch.rand(n, 1, 28, 28), torch.randint(0, 10, (n,))
    optimizer = torch.optim.Adadelta(model.parameters(), lr=RATE)
    return _trained(model, optimizer, lambda: F.nll_loss(F.log_softmax(model(images), 1), labels))


def _texts(task: Task, place: Place) -> Steps:
    _vision()  # transformers looks for it
    library = importlib.import_module("transformers")
    config_name, model_name, settings = TEXTS[task.model]
    if place.tiny:
        settings = {**settings, DEPTH[task.model.split("-")[0]]: 1}
    model = getattr(library, model_name)(getattr(library, config_name)(**settings))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    n, most = _batch(task, place), 32 if place.tiny else TEXT

    def launch_of(length: int) -> Launch:
        tokens = torch.randint(3, model.config.vocab_size - 1, (n, length))
        classifies = task.model.startswith("xlnet")  # with the library's Trainer, which clips
        labels = torch.ones(n, dtype=torch.long) if classifies else tokens
        batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
        return _trained(model, optimizer, lambda: _text_loss(task.model, model, batch), clips=classifies)

    largest = launch_of(most)
    return Steps(launch_of(min(most, USUAL[task.model])) if task.model in USUAL else largest, largest)


def _text_loss(name: str, model: Any, batch: dict[str, Any]) -> Any:
    if not name.startswith("bert"):
        return model(**batch).loss
    kept = (
        torch.rand(batch["input_ids"].shape, device=batch["input_ids"].device) > 0.15
    )  # places that are not asked for
    return model(**{**batch, "labels": batch["labels"].masked_fill(kept, -100)}).loss


_SPECIAL: dict[str, Callable[[Task, Place], Launch]] = {
    "unet": _unet,
    "maskrcnn": _maskrcnn,
    "dlrm": _dlrm,
    "mnist": _mnist,
}
