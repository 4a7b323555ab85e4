"""Measures training runs on this machine's GPU: `python collect.py configs.jsonl OUT --parallel 10 --limit-s 560`.

Run by an interpreter that has torch and perhaps no CARMA; the directory `carma/trial/inside` must be on its module
path, as `carma dataset collect` sees to. torch is imported once, then each config runs in a fork. Rows are appended to
OUT/rows.jsonl as they come; when run again, it continues with the missing ones. The order is shuffled, so that a run
that stops early leaves a fair sample. A run that ran short of memory while others ran is repeated alone.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import os
import platform
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import rows  # type: ignore[import-not-found]
from forks import answer_in_fork, end_with  # type: ignore[import-not-found]

FREE_SHARE = 0.95  # of the GPU's free memory
WARM_UP_MODELS = 12  # that are built before the first fork
INTERRUPTED = 130


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measures training runs on this machine's GPU.")
    parser.add_argument("configs", type=Path, help="JSON lines of `carma dataset generate`")
    parser.add_argument("out", type=Path, help="directory of rows.jsonl")
    parser.add_argument("--parallel", type=int, default=24, help="maximum number of processes (default 24)")
    parser.add_argument("--limit-s", type=float, default=560.0, help="start no more runs after this time (default 560)")
    parser.add_argument("--config-limit-s", type=float, default=60.0, help="maximum time of one run (default 60)")
    parser.add_argument("--activity", action="store_true", help="also measure step time, GPM activity and power, alone")
    parser.add_argument(
        "--window-s", type=float, default=0.3, help="time over which activity is measured (default 0.3)"
    )
    parser.add_argument(
        "--capacity-mib", type=int, default=0, help="memory for all runs (default 95 %% of free memory)"
    )
    parser.add_argument("--steps", type=int, default=3, help="training steps of a run (default 3)")
    parser.add_argument("--first", type=int, default=0, help="maximum number of configs, after shuffling (default all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order (default 0)")
    parser.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True, help="keep existing rows")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default cuda)")
    parser.add_argument("--parent", type=int, default=0, help="process that has locked OUT; the program ends with it")
    return parser


def main(argv: list[str] | None = None) -> int:
    began_s = time.monotonic()
    args = options().parse_args(argv)
    if args.parent:
        end_with(args.parent, signal.SIGTERM)
    elif not locked(args.out):
        return 1
    existing = rows.Rows(args.out, args.resume, args.activity)
    configs = [config for config in rows.read_configs(args.configs) if not existing.has(config)]
    random.Random(args.seed).shuffle(configs)
    configs = configs[: args.first] if args.first else configs
    if not configs:
        print("nothing is left to measure", flush=True)
        return 0
    return collect(args, existing, configs, began_s)


def collect(args: argparse.Namespace, existing: Any, configs: list[dict[str, Any]], began_s: float) -> int:
    numbers = prepare(configs[:WARM_UP_MODELS])
    head = make_head(args)
    if args.device.startswith("cuda") and not head.get("gpu"):
        print(f"there is no GPU to measure on: {head.get('error')}", file=sys.stderr)
        return 1
    capacity_mib = args.capacity_mib or head.get("free_bytes", 1 << 60) / (1 << 20) * FREE_SHARE
    args.uuid = head.pop("uuid", None)
    existing.write(head)
    import schedule  # type: ignore[import-not-found]

    kind = schedule.ActivitySchedule if args.activity else schedule.Schedule
    made = kind(args, existing, configs, capacity_mib, numbers, began_s)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        made.run()
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        made.pool.end(made.pool.workers)
        made.report()
    return 0


def locked(folder: Path) -> bool:
    """Holds the lock until this process and its forks have ended."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        rows.lock(folder)
    except rows.InUse as error:
        print(f"{folder} is in use: {error}", file=sys.stderr)
        return False
    return True


def prepare(some: list[dict[str, Any]]) -> Any:
    """Imports everything once; forks share it. Nothing here may start CUDA, or no fork could use it.

    torch imports much (sympy: a second) only when a model is first built. A backward pass must not be made here: it
    counts the GPUs, which starts CUDA.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # libraries look for a GPU; this way CUDA is not started
    # The driver makes one context at a time. With one work queue instead of eight it takes half as long, and the
    # footprint is the same to the MiB (80 runs on an H200); a run here has one stream in any case.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    import torch

    torch.set_num_threads(1)  # a thread pool would not survive the fork
    import build
    import loop
    import schedule  # noqa: F401
    import torch.profiler

    for config in some:
        with contextlib.suppress(Exception):  # a config that cannot be built gets a row with its error
            build.build(config)
    numbers = loop.random_numbers()
    gc.freeze()  # a garbage collection in a fork would copy every page
    if torch.cuda.is_initialized():
        raise SystemExit("CUDA was started while libraries were imported: forks of this process cannot use it")
    return numbers


def make_head(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import training_run  # type: ignore[import-not-found]

    return {
        **answer_in_fork(functools.partial(training_run.describe, args.device)),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join(word.rpartition("/")[2] for word in sys.argv),  # without directories of that machine
        "parallel": args.parallel,
        "steps": args.steps,
        "seed": args.seed,
        "activity": args.activity,
        "alloc_conf": os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF"),
    }


if __name__ == "__main__":
    sys.exit(main())
