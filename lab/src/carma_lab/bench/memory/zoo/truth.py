"""Measures each case on this machine's GPU: `python truth.py cases.jsonl OUT --parallel 5 --limit-s 540`.

`carma bench memory-truth` starts it with `carma/trial/inside` and `gpumemnet/dataset/inside` on the module path: the
processes are the workers of the data set's collector. Libraries are imported once; each case is a fork, made before
CUDA starts. Rows are appended to OUT/truth.jsonl as they come, so that a kill loses only the running ones. The order is
shuffled, so that a run that stops early leaves a fair sample. A failed case is a row with its error. A case that was
short of memory beside others is repeated alone.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, BinaryIO

import forks  # type: ignore[import-not-found]
import measure  # type: ignore[import-not-found]

FILE_BYTES = 15 << 20  # of one file of histories
FILES = 4


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measures the memory of training cases on this machine's GPU.")
    parser.add_argument("cases", type=Path, help="JSON lines with id, family and argv")
    parser.add_argument("out", type=Path)
    parser.add_argument("--parallel", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=540.0, help="maximum time of all cases (default 540)")
    parser.add_argument("--case-limit-s", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="only cases whose id or family contains this")
    parser.add_argument("--first", type=int, default=0, help="maximum number of cases, after shuffling (default all)")
    parser.add_argument(
        "--skip", type=Path, action="append", default=[], help="a truth.jsonl whose cases are not measured again"
    )
    parser.add_argument("--device", default="cuda")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = options().parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    versions = import_libraries()
    cases = chosen(args)
    with tempfile.TemporaryDirectory(prefix="truth-") as folder:
        schedule = Schedule(args, Path(folder), began)
        schedule.write({**versions, **gpu(args.device), **description(args, len(cases))})
        schedule.run(cases)
    return 0


def import_libraries() -> dict[str, Any]:
    """All that cases need, once: forks share it. Nothing here may start CUDA, or no fork could."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # libraries ask for a GPU as they load; this way CUDA stays out
    import torch

    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 4))
    vision = importlib.import_module("models_vision").import_torchvision()
    library = importlib.import_module("transformers")
    for name in ("case", "models_vision", "models_hf", *importlib.import_module("case").OWN):
        importlib.import_module(name)
    for config, model, _, _ in importlib.import_module("models_hf").MODELS.values():
        getattr(library, config), getattr(library, model)  # they are imported when first named
    if torch.cuda.is_initialized():
        raise SystemExit("a library started CUDA while it was imported: forks of this process cannot use it")
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "torchvision": vision.__version__,
        "transformers": library.__version__,
    }


def description(args: argparse.Namespace, cases: int) -> dict[str, Any]:
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {
        "date": date,
        "cases": cases,
        "seed": args.seed,
        "parallel": args.parallel,
        "alloc_conf": os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def gpu(device: str) -> dict[str, Any]:
    """The GPU, its driver and cuDNN, read in a fork, because that starts CUDA."""
    training_run = importlib.import_module("training_run")
    found = dict(forks.answer_in_fork(functools.partial(training_run.describe, device)))
    return {name: value for name, value in found.items() if name not in ("uuid", "free_bytes")}


def chosen(args: argparse.Namespace) -> list[dict[str, Any]]:
    done = set()
    for path in args.skip:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        done |= {row["id"] for row in rows if "id" in row and not row.get("error")}
    cases = [json.loads(line) for line in args.cases.read_text().splitlines() if line.strip()]
    cases = [case for case in cases if case["id"] not in done]
    cases = [case for case in cases if args.only in case["id"] or args.only in case["family"]]
    random.Random(args.seed).shuffle(cases)
    return cases[: args.first] if args.first else cases


class Schedule:
    """Cases side by side, each in its own process, and the files of their rows."""

    def __init__(self, args: argparse.Namespace, folder: Path, began: float) -> None:
        worker_pool = importlib.import_module("worker_pool")
        self.args, self.folder, self.began = args, folder, began
        self.rows = (args.out / "truth.jsonl").open("a")
        live = functools.partial(measure.answer, device=args.device, folder=folder)
        self.pool: Any = worker_pool.WorkerPool(live, self.take, args.case_limit_s)
        self.again: list[dict[str, Any]] = []
        self.done = 0

    def write(self, row: dict[str, Any]) -> None:
        self.rows.write(json.dumps(row, separators=(",", ":")) + "\n")
        self.rows.flush()

    def run(self, cases: list[dict[str, Any]]) -> None:
        waiting = list(reversed(cases))
        while (waiting or self.pool.workers or self.again) and not self.is_late():
            while waiting and len(self.pool.workers) < self.args.parallel:
                self.pool.start(waiting.pop(), 0.0, False)
            if not waiting and not self.pool.workers and self.again:
                self.pool.start(self.again.pop(), 0.0, True)
            for worker in self.pool.read_among("waiting"):
                worker.enter("running")
                worker.send("go")
            self.pool.poll()
        for worker in self.pool.workers:
            took_s = round(time.monotonic() - worker.began_s, 2)
            self.write({**worker.config, "error": "stopped: the time of all cases was over", "took_s": took_s})
        self.pool.end(self.pool.workers)

    def is_late(self) -> bool:
        return time.monotonic() - self.began > float(self.args.limit_s)

    def take(self, worker: Any, row: dict[str, Any]) -> None:
        case, history = worker.config, self.folder / f"{worker.pid}.bin"
        again = row.pop("again", False) or row.get("retries")
        row.pop("footprint", None)
        if again and not worker.alone:
            self.again.append(case)
        else:
            if history.exists():
                row["history"] = self.keep(history.read_bytes())
            self.write({**case, **row, "alone": worker.alone})
            self.done += 1
            mib = (row.get("reserved_peak") or 0) >> 20
            print(f"{self.done} {case['id']} {mib} MiB {row.get('error') or ''}", flush=True)
        history.unlink(missing_ok=True)
        worker.release()

    def keep(self, record: bytes) -> list[Any] | None:
        """Place of the record (file, offset, length); None if all files are full."""
        for number in range(FILES):
            path = self.args.out / f"history-{number}.bin"
            size = path.stat().st_size if path.exists() else 0
            if size + len(record) <= FILE_BYTES:
                file: BinaryIO
                with path.open("ab") as file:
                    file.write(record)
                return [path.name, size, len(record)]
        return None


if __name__ == "__main__":
    sys.exit(main())
