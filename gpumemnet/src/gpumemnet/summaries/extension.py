"""The extension `model-summary` of `carma estimate --summary`: reads a summary and adds the training options."""

from __future__ import annotations

from pathlib import Path

from carma.trial.layers.description import ReadSummary, TrainingOptions
from gpumemnet.summaries import read_bytes, read_file
from gpumemnet.summaries.training_options import completed


def read_summary(
    source: Path | bytes, options: TrainingOptions, *, batch: int | None, sample: tuple[int, ...]
) -> ReadSummary:
    """Implements `carma.trial.layers.description.SummaryReader`."""
    if isinstance(source, bytes):
        read = read_bytes(source, batch=batch, sample=sample)
    else:
        read = read_file(source, batch=batch, sample=sample)
    return completed(read, options)
