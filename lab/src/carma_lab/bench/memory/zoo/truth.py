"""What each case really takes: `python truth.py cases.jsonl OUT --parallel 5 --limit-s 540`, on a machine with a GPU.

The libraries are imported once; each case is a fork of this process, made before CUDA starts, so it has a context and
an allocator of its own. Rows are appended to OUT/truth.jsonl as they come: a kill loses only what is running.
The order is shuffled, so that an early stop leaves a fair sample. A case that failed is a row with its error. One
that ran into the card's end beside others (torch then gives cached memory back) is run again, alone.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, BinaryIO

FILE_BYTES = 15 << 20  # of one file of histories
FILES = 4


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measures the memory of training cases on this machine's GPU.")
    parser.add_argument("cases", type=Path, help="JSON lines with id, family and argv")
    parser.add_argument("out", type=Path)
    parser.add_argument("--parallel", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=540.0, help="no case starts after this; the rest is killed")
    parser.add_argument("--case-limit-s", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="cases whose id or family contains this")
    parser.add_argument("--first", type=int, default=0, help="at most so many, after shuffling")
    parser.add_argument("--skip", type=Path, action="append", default=[], help="a truth.jsonl whose cases are done")
    parser.add_argument("--device", default="cuda")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = options().parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    versions = import_libraries()
    cases = chosen(args)
    work = Path(tempfile.mkdtemp(prefix="truth-"))
    try:
        course = Course(args, work, began)
        course.write({**versions, **head(work, args.device), **told(args, len(cases))})
        course.run(cases)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return 0


def import_libraries() -> dict[str, Any]:
    """All that cases need, once: forks share it. Nothing here may start CUDA, or no fork could."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # libraries ask for a GPU as they load; this way CUDA stays out
    import torch

    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 4))
    vision = importlib.import_module("ops").import_torchvision()
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


def told(args: argparse.Namespace, cases: int) -> dict[str, Any]:
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {
        "date": date,
        "cases": cases,
        "seed": args.seed,
        "parallel": args.parallel,
        "alloc_conf": os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def head(work: Path, device: str) -> dict[str, Any]:
    """The card, its driver and cuDNN, asked by a fork, because asking starts CUDA."""
    pid = os.fork()
    answer = work / "head.json"
    if pid == 0:
        code = 1
        try:
            answer.write_text(json.dumps(importlib.import_module("measure").describe(device)))
            code = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.waitpid(pid, 0)
    return dict(json.loads(answer.read_text())) if answer.exists() else {"gpu": None}


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


class Course:
    """Cases side by side, each in its own process and process group, and the files that they end in."""

    def __init__(self, args: argparse.Namespace, work: Path, began: float) -> None:
        self.args, self.work, self.began = args, work, began
        self.rows = (args.out / "truth.jsonl").open("a")
        self.running: dict[int, tuple[dict[str, Any], float, bool]] = {}
        self.again: list[dict[str, Any]] = []
        self.done = 0

    def write(self, row: dict[str, Any]) -> None:
        self.rows.write(json.dumps(row, separators=(",", ":")) + "\n")
        self.rows.flush()

    def run(self, cases: list[dict[str, Any]]) -> None:
        waiting = list(reversed(cases))
        while (waiting or self.running or self.again) and not self.late():
            while waiting and len(self.running) < self.args.parallel:
                self.start(waiting.pop(), alone=False)
            if not waiting and not self.running and self.again:
                self.start(self.again.pop(), alone=True)
            self.reap()
        for pid, (case, since, _) in list(self.running.items()):
            self.end(pid)
            self.write({**case, "error": "stopped: the whole run's time was over", "took_s": time.monotonic() - since})

    def late(self) -> bool:
        return time.monotonic() - self.began > float(self.args.limit_s)

    def start(self, case: dict[str, Any], alone: bool) -> None:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.setsid()
                importlib.import_module("measure").run(case, self.args.device, self.work / str(os.getpid()))
                code = 0
            finally:
                os._exit(code)  # never back into the parent's loop, and no time for tearing CUDA down
        self.running[pid] = (case, time.monotonic(), alone)

    def reap(self) -> None:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in self.running:
            self.take(pid, status)
        elif pid == 0:
            now = time.monotonic()
            for running, (_, since, _) in list(self.running.items()):
                if now - since > self.args.case_limit_s:
                    self.end(running)
                    self.take(running, signal.SIGKILL)
            time.sleep(0.01)

    def end(self, pid: int) -> None:
        for target in (os.killpg, os.kill):  # the group may not exist yet, if the fork has only just been made
            try:
                target(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        os.waitpid(pid, 0)

    def take(self, pid: int, status: int) -> None:
        case, since, alone = self.running.pop(pid)
        answer, history = self.work / f"{pid}.json", self.work / f"{pid}.bin"
        row: dict[str, Any] = json.loads(answer.read_text()) if answer.exists() else {"error": ended_by(status)}
        row |= {"took_s": round(time.monotonic() - since, 2), "alone": alone}
        if (row.get("retries") or row.get("oom")) and not alone:
            self.again.append(case)
        else:
            if history.exists():
                row["history"] = self.keep(history.read_bytes())
            self.write({**case, **row})
            self.done += 1
            print(
                f"{self.done} {case['id']} {row.get('reserved_peak', 0) >> 20} MiB {row.get('error') or ''}", flush=True
            )
        answer.unlink(missing_ok=True)
        history.unlink(missing_ok=True)

    def keep(self, record: bytes) -> list[Any] | None:
        """Where the record lies (file, offset, length); None when all files are full."""
        for number in range(FILES):
            path = self.args.out / f"history-{number}.bin"
            size = path.stat().st_size if path.exists() else 0
            if size + len(record) <= FILE_BYTES:
                file: BinaryIO
                with path.open("ab") as file:
                    file.write(record)
                return [path.name, size, len(record)]
        return None


def ended_by(status: int) -> str:
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return f"killed by {name}" + (": over its time, or the machine's memory" if name == "SIGKILL" else "")
    return f"ended with status {os.WEXITSTATUS(status)} and no answer"


if __name__ == "__main__":
    sys.exit(main())
