"""Names that the command line needs before torch is imported, and the class widths of each family."""

from __future__ import annotations

from collections.abc import Mapping

from gpumemnet.serving.model_facts import Kind

SERVED: Mapping[str, Kind] = {"mlp-based": "mlp", "transformer-based": "transformer"}
PUBLISHED = "published"
NAMES = (*SERVED, "graph", "extra-trees", "boosted", PUBLISHED)
# In GB, the published ones first; 1 GB is what packing needs.
WIDTHS_GB: Mapping[str, tuple[int, ...]] = {"mlp": (1, 2), "cnn": (8, 1), "transformer": (8, 1)}
PUBLISHED_WIDTHS_GB: Mapping[str, tuple[int, ...]] = {"mlp": (1, 2), "cnn": (8,), "transformer": (8,)}
FAMILIES = tuple(WIDTHS_GB)
# Modules of the extra `train`, and their packages.
EXTRA: Mapping[str, str] = {
    "torch": "torch",
    "sklearn": "scikit-learn",
    "pyarrow": "pyarrow",
    "onnx": "onnx",
    "onnxscript": "onnxscript",
    "matplotlib": "matplotlib",
}
