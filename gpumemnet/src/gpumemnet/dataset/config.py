"""One training run as one line of JSON, from which the same model can be built again.

`model` is a small program, read from top to bottom; `inside/build.py` runs it and documents the fields of each op. All
random choices are written out, so that neither the seed nor the generator's version is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec

from carma.core.model.values import Record
from carma.errors import Usage
from carma.trial.layers.description import Precision
from gpumemnet import Family

Optimizer = Literal["sgd", "momentum", "adam", "adamw", "rmsprop", "adagrad"]
Loss = Literal["classes", "tokens", "values", "pixels"]

Op = Mapping[str, Any]


class Config(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: str  # "cnn-7-000123": family, seed, number
    family: Family
    shape: str  # kind of network in the generator: pyramid, residual, encoder …
    batch: int
    input: tuple[int, ...]  # of one sample: (features,), (3, height, width); (tokens,) where `vocabulary` is not 0
    vocabulary: int = 0  # of the input's tokens; 0: the input consists of real numbers
    outputs: int  # classes, or values
    loss: Loss = "classes"  # one class for each sample, token or pixel; or values
    target: int = 0  # tokens of the target sequence of an encoder-decoder; 0: no second input
    optimizer: Optimizer = "adam"
    precision: Precision = "fp32"
    checkpointing: bool = False  # of each op "block"
    channels_last: bool = False
    guess_mib: int = 0  # the generator's rough estimate, which the collector reserves
    model: tuple[dict[str, Any], ...]


def read_configs(path: Path) -> Iterator[Config]:
    """One config a line; empty lines are ignored. An invalid line is reported with its number."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _read(line, path, number)
    except OSError as error:
        raise Usage(f"{path} cannot be read: {error.strerror}", "`carma dataset generate` makes one.") from error


def _read(line: bytes, path: Path, number: int) -> Config:
    try:
        return msgspec.json.decode(line, type=Config)
    except msgspec.MsgspecError as error:
        raise Usage(f"{path}, line {number}: {error}", "`carma dataset generate` makes such lines.") from error


def write_configs(configs: Iterable[Config], file: BinaryIO) -> None:
    file.writelines(encode(config) + b"\n" for config in configs)


def encode(config: Config) -> bytes:
    """All fields in their order, so that equal configs are equal bytes."""
    return msgspec.json.encode(config)


def ops_of(program: object) -> Iterator[Op]:
    """Every op of a program, also inside other ops; a repeated op once."""
    if isinstance(program, Mapping):
        yield program
        program = tuple(program.values())
    if isinstance(program, list | tuple):
        for part in program:
            yield from ops_of(part)
