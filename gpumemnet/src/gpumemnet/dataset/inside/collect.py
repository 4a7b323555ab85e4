"""Measures training runs on this machine's GPU: `python collect.py configs.jsonl OUT --parallel 10 --limit-s 560`.

Run by an interpreter that has torch; CARMA is not needed. torch is imported once, then each config runs in a fork of
its own. Rows are appended to OUT/rows.jsonl as they come; run again, it goes on with what is missing. The order is
shuffled, so that an early stop leaves a fair sample. A run that was short of memory beside others is made again, alone.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import rows  # type: ignore[import-not-found]
from parent import end_with  # type: ignore[import-not-found]

FREE_SHARE = 0.95  # of the card's free memory
WARM = 12  # models that are built before the first fork
INTERRUPTED = 130


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measures training runs on this machine's GPU.")
    parser.add_argument("configs", type=Path, help="JSON lines, as `carma dataset generate` makes them")
    parser.add_argument("out", type=Path, help="the directory of rows.jsonl")
    parser.add_argument("--parallel", type=int, default=24, help="processes side by side (24)")
    parser.add_argument("--limit-s", type=float, default=560.0, help="nothing starts after it")
    parser.add_argument("--config-limit-s", type=float, default=60.0)
    parser.add_argument("--activity", action="store_true", help="step time, SM activity, power too; alone, in turn")
    parser.add_argument("--window-s", type=float, default=0.3, help="how long activity is watched")
    parser.add_argument("--capacity-mib", type=int, default=0, help="memory that all may take (95 %% of what is free)")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="at most so many, after shuffling")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parent", type=int, default=0, help="the process that has locked OUT, and to end with")
    return parser


def main(argv: list[str] | None = None) -> int:
    began_s = time.monotonic()
    args = options().parse_args(argv)
    if args.parent:
        end_with(args.parent, signal.SIGTERM)
    elif not locked(args.out):
        return 1
    kept = rows.Rows(args.out, args.resume, args.activity)
    queue = [config for config in rows.read_configs(args.configs) if not kept.has(config)]
    random.Random(args.seed).shuffle(queue)
    queue = queue[: args.first] if args.first else queue
    if not queue:
        print("nothing is left to measure", flush=True)
        return 0
    return collect(args, kept, queue, began_s)


def collect(args: argparse.Namespace, kept: Any, queue: list[dict[str, Any]], began_s: float) -> int:
    numbers = prepare(queue[:WARM])
    head = make_head(args)
    if args.device.startswith("cuda") and not head.get("gpu"):
        print(f"there is no GPU to measure on: {head.get('error')}", file=sys.stderr)
        return 1
    capacity_mib = args.capacity_mib or head.get("free_bytes", 1 << 60) / (1 << 20) * FREE_SHARE
    args.uuid = head.pop("uuid", None)
    kept.write(head)
    import run_order  # type: ignore[import-not-found]

    made = (run_order.Turns if args.activity else run_order.Course)(args, kept, queue, capacity_mib, numbers, began_s)
    signal.signal(signal.SIGTERM, interrupt)
    try:
        made.run()
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        made.crew.end(made.workers.children)
        made.tell()
    return 0


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def locked(folder: Path) -> bool:
    """Until this process and its forks are gone."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        rows.lock(folder)
    except rows.InUse as error:
        print(f"{folder} is in use: {error}", file=sys.stderr)
        return False
    return True


def prepare(some: list[dict[str, Any]]) -> Any:
    """All imports, once: forks share them. Nothing here may start CUDA, or no fork could use it.

    torch imports much (sympy: a second) only when a model is first built. A backward pass may not be made here: it
    counts the GPUs, which starts CUDA.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # libraries ask for a GPU as they load; this way CUDA stays out
    # The driver makes one context at a time. With one queue of work instead of eight it takes half as long, and the
    # footprint is the same to the MiB (80 runs on an H200); a run here has one stream in any case.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    import torch

    torch.set_num_threads(1)  # a pool of threads would not live on in the forks
    import build
    import loop
    import run_order  # noqa: F401
    import torch.profiler

    for config in some:
        with contextlib.suppress(Exception):  # a config that cannot be built says so in its own row
            build.build(config)
    numbers = loop.random_numbers()
    gc.freeze()  # a collection in a fork would copy every page of all this
    if torch.cuda.is_initialized():
        raise SystemExit("CUDA was started while libraries were imported: forks of this process cannot use it")
    return numbers


def make_head(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    return {
        **asked_in_fork(args.device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join(word.rpartition("/")[2] for word in sys.argv),  # not where things lay on that machine
        "parallel": args.parallel,
        "steps": args.steps,
        "seed": args.seed,
        "activity": args.activity,
        "alloc_conf": os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF"),
    }


def asked_in_fork(device: str) -> dict[str, Any]:
    import measure  # type: ignore[import-not-found]

    reader, writer = os.pipe()
    ours = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            end_with(ours, signal.SIGKILL)
            os.close(reader)
            try:
                answer = measure.describe(device)
            except Exception as error:
                answer = {"gpu": None, "error": f"{type(error).__name__}: {error}"}
            os.write(writer, json.dumps(answer).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answered:
        said = answered.read()
    os.waitpid(pid, 0)
    return dict(json.loads(said)) if said else {"gpu": None, "error": "the driver ended the process that asked"}


if __name__ == "__main__":
    sys.exit(main())
