"""Lists the layers of configs' models: `python layers.py configs.jsonl layers.jsonl --processes 2`. No GPU is needed.

A model is built without memory (the meta device) and called once with its real batch. Layers are those of a trial run
(`carma_trial/describe.py`), so the directory `carma/trial/inside` must be on the module path. An edge connects two
layers if the output of one reaches the input of the other; sums, products, concatenations and views between them are no
layers. Standard library and torch only. Existing lines are kept, so that a stopped run continues.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import build
import rows  # type: ignore[import-not-found]
import shapes  # type: ignore[import-not-found]
import torch
from carma_trial.describe import layer_of  # type: ignore[import-not-found]  # only attach.py changes torch
from forks import end_with  # type: ignore[import-not-found]
from torch.utils._python_dispatch import TorchDispatchMode

UNWRITTEN = 3  # exit status if the file cannot be written
NOTHING: frozenset[int] = frozenset()
SOURCES = "carma_sources"  # attribute of a tensor: the layers it comes from, without another layer in between


class SourceTracking(TorchDispatchMode):  # type: ignore[misc,unused-ignore]
    """The result of an operation has the sources of its operands."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = shapes.result(func, args, kwargs)
        found = NOTHING.union(*(sources_of(each) for each in tensors_in((*args, *kwargs.values()))))
        if found:
            mark(result, found)
        return result


def sources_of(tensor: Any) -> frozenset[int]:
    found: frozenset[int] = getattr(tensor, SOURCES, NOTHING)
    return found


def mark(value: Any, sources: frozenset[int]) -> None:
    for tensor in tensors_in((value,)):
        setattr(tensor, SOURCES, sources)


def tensors_in(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


class Listing:
    """The layers of one pass, in the order in which they end, and the edges between them."""

    def __init__(self) -> None:
        self.layers: list[dict[str, Any]] = []
        self.edges: list[tuple[int, int]] = []
        self.seen: list[int] = []  # parameters of layers, one that is called twice or tied as often as it is met

    def add(self, module: Any, inputs: Any, outputs: Any) -> None:
        layer = None if isinstance(module, build.Chain) else layer_of(module, inputs, outputs)
        if layer is None:  # build.py writes an identity as an empty chain; models of users have no such module
            return
        number = len(self.layers)
        self.layers.append(layer)
        self.seen.extend(id(parameter) for parameter in module.parameters(recurse=False))
        given = NOTHING.union(*(sources_of(tensor) for tensor in tensors_in((outputs,))))
        self.edges.extend((source, number) for source in sorted(given))
        mark(outputs, frozenset((number,)))


def describe(config: dict[str, Any]) -> dict[str, Any]:
    """One line of the file. Gradients are off, so nothing is recomputed and every layer is called once."""
    listing = Listing()
    with torch.inference_mode(), SourceTracking():  # without inference mode, views would be other tensors
        model = build.build(config).train()
        for module in model.modules():
            module.register_forward_hook(listing.add)
        model(*inputs_of(config))
    return {"id": config["id"], **counted(model, listing.seen), "layers": listing.layers, "edges": listing.edges}


def inputs_of(config: dict[str, Any]) -> list[Any]:
    kind = torch.long if config.get("vocabulary") else torch.float32
    inputs = [torch.empty(config["batch"], *config["input"], dtype=kind, device="meta")]
    if config.get("target"):
        inputs.append(torch.empty(config["batch"], config["target"], dtype=torch.long, device="meta"))
    return inputs


def counted(model: Any, seen: list[int]) -> dict[str, int]:
    """The model's parameters, and the difference to the sum over its layers: sum = parameters + tied - inside.

    `tied` parameters belong to two layers (an embedding and the output layer) and count in both. `inside` parameters
    belong to a module that is never called, such as the output projection of torch's attention: no layer has them.
    """
    sizes = {id(parameter): parameter.numel() for parameter in model.parameters()}
    return {
        "parameters": sum(sizes.values()),
        "tied": sum(map(sizes.__getitem__, seen)) - sum(map(sizes.__getitem__, set(seen))),
        "inside": sum(size for key, size in sizes.items() if key not in set(seen)),
    }


def answer(config: dict[str, Any]) -> bytes:
    """A config that cannot be built gets a line too, so that it is not tried again."""
    try:
        line = describe(config)
    except Exception as error:
        line = {"id": config["id"], "error": f"{type(error).__name__}: {error}"[:500]}
    return json.dumps({**line, "of": config["of"]}, separators=(",", ":")).encode() + b"\n"


def known(path: Path) -> dict[str, str]:
    """The ids in the file, with their configs' digests. An incomplete last line is removed."""
    rows.mend(path)
    lines = path.read_bytes().splitlines() if path.exists() else ()
    return {line["id"]: line["of"] for line in map(json.loads, lines)}


def write(configs: list[dict[str, Any]], file: BinaryIO, processes: int) -> None:
    torch.set_num_threads(1)
    if processes == 1:
        file.writelines(map(answer, configs))
        return
    with multiprocessing.get_context("fork").Pool(processes, end_with, (os.getpid(), signal.SIGKILL)) as pool:
        for done, line in enumerate(pool.imap_unordered(answer, configs, chunksize=8), 1):
            file.write(line)
            file.flush()
            if done % 500 == 0:
                print(f"layers of {done:,} of {len(configs):,} configs", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Lists the layers of the models of configs.")
    parser.add_argument("configs", type=Path, help="JSON lines of `carma dataset generate`")
    parser.add_argument("layers", type=Path, help="output: a JSON line for each config; existing lines are kept")
    parser.add_argument("--processes", type=int, default=2, help="number of processes (default 2)")
    parser.add_argument("--parent", type=int, default=0, help="process with which this one ends")
    args = parser.parse_args(argv)
    if args.parent:
        end_with(args.parent, signal.SIGKILL)
    done = known(args.layers)
    left = [config for config in rows.read_configs(args.configs) if done.get(config["id"]) != config["of"]]
    try:
        with args.layers.open("ab") as file:
            write(left, file, args.processes)
    except OSError as error:
        print(f"{args.layers} cannot be written: {error.strerror}", file=sys.stderr)
        return UNWRITTEN
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
