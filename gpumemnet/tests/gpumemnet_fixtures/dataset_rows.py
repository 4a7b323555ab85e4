"""Configs of every kind, small enough to be built in a moment, and rows as a collector would have measured them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpumemnet import Family
from gpumemnet.dataset import layer_lists
from gpumemnet.dataset.config import Config, encode
from gpumemnet.dataset.generate import generate
from gpumemnet.dataset.layer_lists import LISTER
from gpumemnet.dataset.ranges import Ranges
from gpumemnet_fixtures.torch_programs import run_file

MIB = 2**20
HEAD = {"gpu": "NVIDIA H200", "driver": "1.2", "torch": "2.13.0", "date": "2026-01-02T03:04:05Z", "command": "collect"}
RESIDUAL = [
    {"op": "linear", "out": 32},
    {"op": "add", "bodies": [[], [{"op": "linear", "out": 32}, {"op": "act", "f": "relu", "inplace": True}]]},
    {"op": "linear", "out": 10},
]
CONVOLUTIONS = [
    {"op": "conv", "out": 8, "k": 3, "s": 2},
    {"op": "norm", "f": "batch"},
    {"op": "act", "f": "silu", "functional": True},
    {"op": "block", "body": [{"op": "cat", "bodies": [[], [{"op": "conv", "groups": 0, "k": 5}]]}]},
    {"op": "mul", "bodies": [[], [{"op": "conv", "out": 16, "k": 1}, {"op": "act", "f": "sigmoid"}]]},
    {"op": "norm", "f": "group", "groups": 4},
    {"op": "pool", "f": "max", "k": 2},
    {"op": "pool", "f": "avg", "k": 0},
    {"op": "flatten"},
    {"op": "linear", "out": 10},
]
DECODER = [
    {"op": "embed", "vocabulary": 50, "out": 16},
    {"op": "positions", "length": 12},
    {"op": "add", "bodies": [[], [{"op": "norm", "f": "layer"}, {"op": "attention", "heads": 2, "causal": True}]]},
    {"op": "attention", "heads": 2, "style": "conv1d", "how": "eager", "dropout": 0.1, "causal": True},
    {"op": "norm", "f": "rms"},
    {"op": "dropout", "p": 0.1},
    {"op": "linear", "out": 50, "tied": True, "bias": False},
]
SEQ2SEQ = [{
    "op": "seq2seq",
    "encoder": [{"op": "embed", "vocabulary": 50, "out": 16}, {"op": "attention", "heads": 2, "style": "torch"}],
    "decoder": [
        {"op": "embed", "vocabulary": 50, "out": 16},
        {"op": "attention", "heads": 2, "kv": 1, "cross": True},
        {"op": "linear", "out": 50},
    ],
}]  # fmt: skip


def config(id: str, family: str = "mlp", **fields: Any) -> Config:
    kinds: dict[str, dict[str, Any]] = {
        "mlp": {"model": RESIDUAL, "input": (20,), "outputs": 10},
        "cnn": {"model": CONVOLUTIONS, "input": (3, 16, 16), "outputs": 10, "checkpointing": True},
        "transformer": {
            "model": DECODER, "input": (12,), "vocabulary": 50, "outputs": 50, "loss": "tokens",
            "precision": "bf16-amp",
        },
        "seq2seq": {"model": SEQ2SEQ, "input": (12,), "vocabulary": 50, "outputs": 50, "loss": "tokens", "target": 6},
    }  # fmt: skip
    whole = {"family": "transformer" if family == "seq2seq" else family, "shape": "some", "batch": 4, **kinds[family]}
    return msgspec.convert({**whole, "id": id, **fields}, Config)


def row(id: str, allocated_mib: float = 100.0, **fields: Any) -> dict[str, Any]:
    """With 24 MiB of cache and 500 of context."""
    allocated = int(allocated_mib * MIB)
    return {
        "id": id, "allocated_peak": allocated, "requested_peak": allocated - 100, "reserved_peak": allocated + 24 * MIB,
        "footprint": allocated + 524 * MIB, "context": 500 * MIB, "steps": 4, "retries": 0, "oom": False, "error": None,
        "alone": False, "took_s": 1.5, **fields,
    }  # fmt: skip


ACTIVE = {
    "step_ms": 3.5, "sm_active": 0.5, "sm_occupancy": 0.25, "gr_active": 0.9, "dram_active": 0.3, "tensor_active": 0.0,
    "power_w": 300.0,
}  # fmt: skip


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in (HEAD, *rows)))
    return path


def write_configs(path: Path, *configs: Config) -> Path:
    path.write_bytes(b"".join(encode(one) + b"\n" for one in configs))
    return path


def run_lister(configs: Path, layers: Path, processes: int = 1) -> None:
    run_file(LISTER, [str(configs), str(layers), "--processes", str(processes)])


@pytest.fixture(scope="module", autouse=True)
def quick_listing() -> Iterator[None]:
    """In the modules that import it, `Lister` runs its program in a process that has imported torch already."""

    def run(command: Sequence[str]) -> None:
        _python, program, *words = command
        run_file(Path(program), words[: words.index("--parent")])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_lists, "_run", run)
        yield


def generated(family: Family, count: int, seed: int, ranges: Ranges) -> list[Config]:
    return [aimed.config for aimed in generate(family, count, seed, ranges)]
