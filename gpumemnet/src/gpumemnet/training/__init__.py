"""Learns the estimators from the data set and evaluates them on unseen rows.

This module imports no torch: the command line needs the names of the learners first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpumemnet.serving.model_facts import Kind

SERVED: Mapping[str, Kind] = {"mlp-based": "mlp", "transformer-based": "transformer"}
PUBLISHED = "published"
NAMES = (*SERVED, "graph", "extra-trees", "boosted", PUBLISHED)
# Widths of the classes in GB, the published ones first; 1 GB is what packing needs.
WIDTHS_GB: Mapping[str, tuple[int, ...]] = {"mlp": (1, 2), "cnn": (8, 1), "transformer": (8, 1)}
PUBLISHED_WIDTHS_GB: Mapping[str, tuple[int, ...]] = {"mlp": (1, 2), "cnn": (8,), "transformer": (8,)}
