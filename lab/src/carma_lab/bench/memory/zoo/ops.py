"""Lets torchvision be imported where its compiled part does not load (a CUDA wheel beside a CPU build of torch).

Only the operators that torchvision names while it is imported are declared, without kernels: the classification,
segmentation and video models need none of them. Where the compiled part loads, this does nothing.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

DECLARED = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_kept: list[Any] = []  # a library's declarations live as long as the object


def import_torchvision() -> Any:
    """The torchvision package, with its operators declared if nobody else declared them."""
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
