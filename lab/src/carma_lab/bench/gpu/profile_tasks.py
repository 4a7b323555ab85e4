"""The tasks of the published traces: what each trains, and how long its training loop took on an A100 40 GB.

Facts, restated: models, batches, optimizers, image sizes and text lengths are those of the authors' scripts (GitHub
itu-rad/CARMA, folder workloads); `loop_s` is the training loop of a run alone (GitHub ehsanyousefzadehasl/AEGIS, solo
profiles of the same tasks). Those profiles also show that XLNet, which asks for two GPUs, leaves the second one idle.

A step of that loop is `loop_s / steps`. It holds what the card needs and what the loader makes it wait for. `steps`
counts a validation batch as a third of a training step, since it goes forward only. Standard library only: the program
that measures is run where nothing can be installed.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

IMAGENET = (1_281_167, 50_000)  # images to train on and to validate with
CIFAR = (50_000, 10_000)
MNIST = (60_000, 10_000)
VOC = (1_464, 1_449)
COCO = (117_266, 5_000)  # images that have something to find in them
WIKITEXT_LINES = 36_718
FORWARD_ONLY = 1 / 3  # of a training step


class Task(NamedTuple):
    """One model at one batch size. `trace_names` are its names in the traces; `loop_s` and `steps` are the A100's."""

    name: str
    model: str
    batch: int
    trace_names: tuple[str, ...]
    loop_s: float
    steps: float
    gpus: int = 1
    busy_gpus: int = 1  # of those it asks for, the ones that do anything

    @property
    def step_ms(self) -> float:
        """A step on the A100, with its loader."""
        return 1000.0 * self.loop_s / self.steps


def _steps(samples: tuple[int, int], batch: int, epochs: int = 1) -> float:
    train, validate = samples
    return epochs * (ceil(train / batch) + FORWARD_ONLY * ceil(validate / batch))


def _imagenet(model: str, trace_name: str, loops_s: tuple[float, float, float]) -> list[Task]:
    """Batches 32, 64 and 128, one epoch."""
    return [
        Task(f"{model}-b{batch}", model, batch, (trace_name + suffix,), loop_s, _steps(IMAGENET, batch))
        for batch, suffix, loop_s in zip((32, 64, 128), ("", "2", "3"), loops_s, strict=True)
    ]


def _cifar(model: str, trace_name: str, loops_s: tuple[float, float, float]) -> list[Task]:
    """Batches 32, 64 and 128, 50 epochs; the runs of 20 epochs are the same task for less long."""
    return [
        Task(
            f"{model}-b{batch}",
            model,
            batch,
            tuple(f"{trace_name}_{epochs}e_{place}" for epochs in (20, 50)),
            loop_s,
            _steps(CIFAR, batch, epochs=50),
        )
        for place, batch, loop_s in zip((1, 2, 3), (32, 64, 128), loops_s, strict=True)
    ]


# In order of how much GPU time they take in the traces: what has to be left out for want of time weighs least.
TASKS: tuple[Task, ...] = (
    *_imagenet("inception", "Inception", (3354.87, 3078.71, 2978.89)),
    *_imagenet("xception", "Xception", (2995.01, 2941.99, 2853.57)),
    *_imagenet("vgg16", "vgg", (3032.79, 2803.88, 2668.29)),
    *_imagenet("resnet50", "resnet", (2087.60, 1946.88, 1866.64)),
    *_imagenet("efficientnet", "efficientNet", (2187.12, 1694.95, 1642.04)),
    Task("gpt2-large-b4", "gpt2-large", 4, ("gpt2_large_2",), 3943.90, ceil(WIKITEXT_LINES / 8), gpus=2, busy_gpus=2),
    Task("xlnet-base-b8", "xlnet-base", 8, ("xlnet_base_cased_2",), 3503.40, 8 * ceil(WIKITEXT_LINES / 8), gpus=2),
    Task("xlnet-large-b4", "xlnet-large", 4, ("xlnet_large_cased_2",), 3455.21, 3 * ceil(WIKITEXT_LINES / 4), gpus=2),
    Task("bert-base-b32", "bert-base", 32, ("BERT_base",), 886.02, ceil(WIKITEXT_LINES / 32)),
    Task("bert-large-b8", "bert-large", 8, ("BERT_large",), 2684.94, ceil(WIKITEXT_LINES / 8)),
    *_imagenet("mobilenet", "mobilenet", (1666.15, 1536.12, 1548.60)),
    Task("maskrcnn-b8", "maskrcnn", 8, ("maskrcnn",), 6564.68, _steps(COCO, 8)),
    Task("unet-b8", "unet", 8, ("UNet",), 1878.16, _steps(VOC, 8, epochs=90)),
    Task("dlrm-b32768", "dlrm", 32_768, ("dlrm",), 1470.27, 10_000),
    *_cifar("efficientnet-cifar", "efficientNet_cifar100", (2615.28, 1370.48, 679.85)),
    *_cifar("mobilenet-cifar", "mobilenet_cifar100", (2038.80, 966.53, 572.07)),
    *_cifar("resnet34-cifar", "resnet34_cifar100", (1921.10, 1002.53, 483.65)),
    *_cifar("resnet18-cifar", "resnet18_cifar100", (1147.33, 600.67, 303.77)),
    # The solo run had batches of 32; its one loader process limits the images per second, whatever the batch.
    Task("mnist-b64", "mnist", 64, ("mnist_train",), 139.54, _steps(MNIST, 64, epochs=14)),
)
