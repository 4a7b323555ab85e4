"""Measures the plan in several processes that share one GPU, and writes the rows as they come.

1. ``constants.jsonl``: versions, memory outside the allocator after each library's first call, first calls.
2. ``rows.jsonl``: what each convolution of the plan allocates.

The parent never starts CUDA, so that every worker can be forked from it with torch already imported.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from . import constants
from .meter import AllocatorMeter, DryMeter, Row, ShortOfMemory, convolution, warm_up
from .plan import MeasuringPlan, Params, flops, make_plan

# The columns that are measured; all others describe the case.
MEASURED = frozenset(("direction", "out_bytes", "peak_bytes", "kept_bytes", "backend", "error", "short", "lost"))
DRY_CASES = 6
DRY_FLOPS_MAX = 2e8
FRESH_LIMIT_S = 60.0

fork = multiprocessing.get_context("fork")


class Sheet:
    """A file with one JSON object a line. Each call writes once, so that lines of several processes do not mix."""

    # The table of a GPU is shipped or copied between machines.
    BYTES_MAX = 14 << 20

    def __init__(self, path: str) -> None:
        self.path = path

    def full(self) -> bool:
        """Whether the file has reached its maximum size."""
        return os.path.exists(self.path) and os.path.getsize(self.path) > self.BYTES_MAX

    def rows(self) -> list[Row]:
        """All rows written so far."""
        with open(self.path, encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    def add(self, rows: list[Row]) -> None:
        """Append rows."""
        text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


def rows_of(case: Params, meter: AllocatorMeter) -> list[Row]:
    """The rows of one case, or one row with the error: that a library refuses a case is a result, too."""
    try:
        rows = convolution(case, meter)
        meter.settle()
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, NotImplementedError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        rows = [{"error": text[:160]}]
        if is_lost(error):
            rows[0]["lost"] = True
        elif is_short(error):
            rows[0]["short"] = True
    return [{**case, **row} for row in rows]


def is_short(error: BaseException) -> bool:
    """Whether the GPU was full."""
    return isinstance(error, ShortOfMemory) or "out of memory" in str(error)


def is_lost(error: BaseException) -> bool:
    """Whether the error makes CUDA unusable in this process."""
    return "CUDA error" in str(error) and not is_short(error)


def work(cases: list[Params], counter: Any, deadline: float, dry: bool, sheet: Sheet) -> None:
    """One worker: measures the next case until none is left or the time is over."""
    # The workers share the CPU cores and compute little there.
    torch.set_num_threads(1)
    meter = DryMeter() if dry else AllocatorMeter()
    warm_up(meter)
    while time.monotonic() < deadline and not sheet.full():
        with counter.get_lock():
            number = counter.value
            counter.value += 1
        if number >= len(cases):
            return
        rows = rows_of(cases[number], meter)
        sheet.add(rows)
        if any(row.get("lost") for row in rows):
            os._exit(3)
        if any(row.get("short") for row in rows):
            torch.cuda.empty_cache()


def run_workers(plan: MeasuringPlan, parallel: int, deadline: float, dry: bool, sheet: Sheet) -> None:
    """Run ``parallel`` workers. A worker that dies loses its case and is replaced.

    The cases ``apart`` have a worker of their own: cuDNN keeps its choice for a shape in the process, so a benchmarked
    choice would be used for the same shape later.
    """
    lanes = [(plan.cases, fork.Value("q", 0))] * max(1, parallel - 1) + [(plan.apart, fork.Value("q", 0))]

    def start(lane: int) -> Any:
        cases, counter = lanes[lane]
        process = fork.Process(target=work, args=(cases, counter, deadline, dry, sheet))
        process.start()
        return process

    running = {lane: start(lane) for lane in range(len(lanes))}
    while running:
        for lane, process in list(running.items()):
            process.join(0.2 / len(lanes))
            if process.is_alive():
                # A call that does not return must not block the run.
                if time.monotonic() > deadline + 15:
                    process.kill()
                continue
            del running[lane]
            cases, counter = lanes[lane]
            if process.exitcode != 0 and time.monotonic() < deadline and counter.value < len(cases):
                running[lane] = start(lane)


def fresh(call: Callable[[], list[Row]], sheet: Sheet, context: Row) -> Any:
    """Start a new process that runs ``call`` and writes its rows."""

    def target() -> None:
        try:
            rows = call()
        except Exception as error:
            rows = [{"error": f"{type(error).__name__}: {error}"[:200]}]
        sheet.add([{**context, **row} for row in rows])

    process = fork.Process(target=target)
    process.start()
    return process


def finish(processes: list[Any]) -> None:
    """Wait for processes, for each at most FRESH_LIMIT_S."""
    for process in processes:
        process.join(FRESH_LIMIT_S)
        if process.is_alive():
            process.kill()
            process.join()


def in_groups(names: list[str], at_once: int, start: Callable[[str], Any]) -> None:
    """Start a process for each name, ``at_once`` at the same time."""
    for first in range(0, len(names), at_once):
        finish([start(name) for name in names[first : first + at_once]])


def measure_constants(meter: AllocatorMeter, broad: bool, sheet: Sheet) -> None:
    """All steps in one process; in a broad run also each step in a process of its own.

    Those run at the same time only if the driver reports memory by process; otherwise each reads the whole GPU.
    """
    names = list(constants.STEPS)

    def start(chosen: list[str]) -> Any:
        return fresh(lambda: constants.one_constant(meter, chosen), sheet, {"op": "constant"})

    finish([start(names)])
    if not broad:
        return
    by_process = all(row.get("source") == "process" for row in sheet.rows()[1:] if "error" not in row)
    in_groups(names, len(names) if by_process else 1, lambda name: start([name]))


def measure_first_calls(meter: AllocatorMeter, parallel: int, sheet: Sheet) -> None:
    """The first calls of each library, each in a new process."""
    in_groups(
        constants.FIRST_CALLS, parallel, lambda name: fresh(lambda: constants.first_calls(meter, name), sheet, {})
    )


def shorten(plan: MeasuringPlan) -> MeasuringPlan:
    """A few cases, small enough for a CPU."""

    def take(cases: list[Params]) -> list[Params]:
        return [case for case in cases if flops(case) <= DRY_FLOPS_MAX][:DRY_CASES]

    return MeasuringPlan(take(plan.cases), take(plan.apart))


def cases_in(path: str) -> list[Params]:
    """The cases of an earlier run's rows, each once."""
    cases: dict[str, Params] = {}
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if row.get("op") == "convolution":
                case = {key: value for key, value in row.items() if key not in MEASURED}
                cases[json.dumps(case, sort_keys=True)] = case
    return list(cases.values())


def make_parser() -> argparse.ArgumentParser:
    """The options of the program."""
    parser = argparse.ArgumentParser(description="Measure the memory that libraries allocate on the first visible GPU.")
    parser.add_argument("--out", required=True, help="directory of the results")
    parser.add_argument("--limit-s", type=float, default=90.0, help="start no more cases after this time (default 90)")
    parser.add_argument("--parallel", type=int, default=8, help="number of processes (default 8)")
    parser.add_argument("--broad", action="store_true", help="measure the large plan, for a table that is shipped")
    parser.add_argument("--dry", action="store_true", help="measure a few small cases on the CPU, without a GPU")
    parser.add_argument("--only", help="measure only the cases of this file, such as rows.jsonl of an earlier run")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Measure, write rows.jsonl and constants.jsonl, and print the number of rows."""
    options = make_parser().parse_args(arguments)
    began = time.monotonic()
    deadline = began + options.limit_s
    os.makedirs(options.out, exist_ok=True)
    rows, constant = (Sheet(os.path.join(options.out, name)) for name in ("rows.jsonl", "constants.jsonl"))
    meter = DryMeter() if options.dry else AllocatorMeter()
    for sheet in (rows, constant):
        finish([fresh(lambda: [constants.versions(meter)], sheet, {})])
    failed = [row["error"] for row in rows.rows() if "error" in row]
    if failed:
        print(f"no usable GPU: {failed[0]}", file=sys.stderr)
        return 1
    if options.only:
        plan = MeasuringPlan(cases_in(options.only), [])
    else:
        measure_constants(meter, options.broad, constant)
        measure_first_calls(meter, options.parallel, constant)
        print(f"constants: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        plan = make_plan(options.broad)
    run_workers(shorten(plan) if options.dry else plan, options.parallel, deadline, options.dry, rows)
    found = rows.rows()[1:]
    errors = sum("error" in row for row in found)
    print(f"rows: {len(found)} ({errors} errors) in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return 0
