"""The public measurements of MLPs on an A100 (GPUMemNet's own), read from a file that a user has: nothing of it ships.

`Activations-Params` lists the layers with activations per sample and parameters; that is as much as a summary tells.
"""

from __future__ import annotations

import ast
import csv
import re
from collections.abc import Mapping
from pathlib import Path

from carma.errors import Usage
from carma.trial.layers.description import Described, Layer
from gpumemnet.training.samples import Origin, Run, Samples, chain, gather, sha256

_KINDS = {"linear": "Linear", "batch_normalization": "BatchNorm1d", "dropout": "Dropout"}
_INPUT = re.compile(r"input:(\d+)_")
_SHAPE = re.compile(r"arch:([a-z]+)_")
HINT = "It is Datasets/MLP/mlp_data_step2.csv of the public GPUMemNet repository."


def read_public(path: Path) -> Samples:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            runs = [_run(row) for row in csv.DictReader(file)]
    except OSError as error:
        raise Usage(f"{path} cannot be read: {error.strerror}", HINT) from error
    except (KeyError, TypeError, ValueError, SyntaxError) as error:
        raise Usage(f"{path} is not the public MLP data: {type(error).__name__}: {error}", HINT) from error
    origin = Origin(data_sha256={path.name: sha256(path)}, gpu="NVIDIA A100 40GB")
    return gather("mlp", runs, origin)


def _run(row: Mapping[str, str]) -> Run:
    batch = int(row["Batch Size"])
    layers = tuple(
        Layer(kind=_KINDS.get(kind, kind), output=(batch, width), parameters=parameters)
        for kind, width, parameters in ast.literal_eval(row["Activations-Params"])
    )
    width, shape = _INPUT.search(row["Filename"]), _SHAPE.search(row["Filename"])
    if width is None or shape is None:
        raise ValueError(f"no input or shape in the name {row['Filename']!r}")
    described = Described(
        layers=layers,
        batch=batch,
        parameters=int(row["Total Parameters"]),
        input=(batch, int(width[1])),
        optimizer="Adam",
        optimizer_slots=2,
    )
    return Run(described, shape[1], float(row["Max GPU Memory (MiB)"]), chain(len(layers)))
