"""The command: deals the plan over processes that share one GPU and writes rows as they come.

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

from . import constants, conv, operators, sequences, updates
from .meter import DryMeter, Meter, Row, ShortOfMemory, warm_up
from .plan import Params, Plan, make_plan

MEASURES: dict[str, Callable[[Row, Meter], list[Row]]] = {
    "convolution": conv.measure,
    "attention": sequences.attention,
    "recurrent": sequences.recurrent,
    "operator": operators.measure,
    "optimizer": updates.optimizer,
    "clip": updates.clip,
    "scaler": updates.scaler,
}
FOUND = frozenset(
    ("direction", "out_bytes", "peak_bytes", "kept_bytes", "backend", "grad_fn", "error", "short", "lost")
)
# A dry run goes through every kind of case, a few times each.
DRY_CASES = 6
DRY_FLOPS_MAX = 2e8
FRESH_LIMIT_S = 60.0

fork = multiprocessing.get_context("fork")


class Sheet:
    """A file of rows, one JSON object a line; one write a line, so that processes do not mix theirs."""

    # A table is small enough to be shipped and to be fetched.
    BYTES_MAX = 14 << 20

    def __init__(self, path: str) -> None:
        self.path = path

    def full(self) -> bool:
        """Whether no more rows should be added."""
        return os.path.exists(self.path) and os.path.getsize(self.path) > self.BYTES_MAX

    def rows(self) -> list[Row]:
        """The rows so far."""
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


def rows_of(case: Params, meter: Meter) -> list[Row]:
    """The rows of one case, or one row with the error: a refusal of the library is knowledge too."""
    try:
        rows = MEASURES[case["op"]](case, meter)
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
    """Whether the card was full."""
    return isinstance(error, ShortOfMemory) or "out of memory" in str(error)


def is_lost(error: BaseException) -> bool:
    """Whether CUDA is unusable in this process from now on."""
    return "CUDA error" in str(error) and not is_short(error)


def work(cases: list[Params], counter: Any, deadline: float, dry: bool, sheet: Sheet) -> None:
    """One worker: takes the next case until none is left or time is up."""
    # A dozen workers share the cores, and little is computed there.
    torch.set_num_threads(1)
    meter = DryMeter() if dry else Meter()
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


def run_workers(plan: Plan, parallel: int, deadline: float, dry: bool, sheet: Sheet) -> None:
    """Keep ``parallel`` workers at it; one that died is replaced (its case is lost, the others are not).

    The cases apart have one worker for themselves: cuDNN's choice for a shape is kept in a process, so a searched
    choice would answer for the same shape later.
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
                # A call that does not come back must not hold the run.
                if time.monotonic() > deadline + 15:
                    process.kill()
                continue
            del running[lane]
            cases, counter = lanes[lane]
            if process.exitcode != 0 and time.monotonic() < deadline and counter.value < len(cases):
                running[lane] = start(lane)


def fresh(call: Callable[[], list[Row]], sheet: Sheet, context: Row) -> Any:
    """Start a process that runs ``call`` and writes its rows."""

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
    """Wait for processes, each at most the limit."""
    for process in processes:
        process.join(FRESH_LIMIT_S)
        if process.is_alive():
            process.kill()
            process.join()


def measure_constants(meter: Meter, broad: bool, sheet: Sheet) -> None:
    """One process that does everything in order; in a broad run also one a step.

    Side by side only where the driver tells processes apart; otherwise each reads the whole card.
    """
    names = [name for name, _ in constants.STEPS]

    def start(chosen: list[str]) -> Any:
        return fresh(lambda: constants.one_constant(meter, chosen), sheet, {"op": "constant"})

    finish([start(names)])
    if not broad:
        return
    if all(row.get("source") == "process" for row in sheet.rows()[1:] if "error" not in row):
        finish([start([name]) for name in names])
    else:
        for name in names:
            finish([start([name])])


def measure_first_calls(meter: Meter, parallel: int, sheet: Sheet) -> None:
    """A process for each library call whose first time differs."""
    names = constants.FIRST_CALLS
    for first in range(0, len(names), parallel):
        finish(
            [
                fresh(lambda name=name: constants.first_calls(meter, name), sheet, {})  # type: ignore[misc]
                for name in names[first : first + parallel]
            ]
        )


def shorten(plan: Plan) -> Plan:
    """A few cases of each kind, small enough for a processor."""
    from .conv_plan import flops

    def take(cases: list[Params]) -> list[Params]:
        kept: dict[str, list[Params]] = {}
        for case in cases:
            if case["op"] == "convolution" and flops(case) > DRY_FLOPS_MAX:
                continue
            if case["op"] == "attention" and case["n"] * case["heads"] * case["length"] > 8192:
                continue
            if case["op"] == "recurrent" and case["n"] * case["length"] * case["hidden"] > 1 << 18:
                continue
            shape = case.get("shape", [])
            if case["op"] == "operator" and shape not in (
                operators.ROWS[0],
                operators.IMAGES[0],
                operators.SEQUENCES[0],
            ):
                continue
            few = kept.setdefault(case["op"] + case.get("name", ""), [])
            if len(few) < DRY_CASES:
                few.append(case)
        return [case for few in kept.values() for case in few]

    return Plan(take(plan.cases), take(plan.apart))


def cases_in(path: str) -> list[Params]:
    """The cases that a file's rows are about, each once."""
    cases: dict[str, Params] = {}
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if row.get("op") in MEASURES:
                case = {key: value for key, value in row.items() if key not in FOUND}
                cases[json.dumps(case, sort_keys=True)] = case
    return list(cases.values())


def main(arguments: list[str] | None = None) -> int:
    """Measure, write rows.jsonl, constants.jsonl and cuda_ops.txt, and say how many rows there are."""
    parser = argparse.ArgumentParser(description="Measure what libraries take on the first visible GPU.")
    parser.add_argument("--out", required=True, help="folder for the results")
    parser.add_argument(
        "--limit-s", type=float, default=90.0, help="stop taking cases after this time, all phases included"
    )
    parser.add_argument("--parallel", type=int, default=8, help="processes side by side")
    parser.add_argument("--broad", action="store_true", help="the large plan, for a table that is shipped")
    parser.add_argument("--dry", action="store_true", help="no GPU: a few small cases on the processor")
    parser.add_argument("--seed", type=int, default=None, help="another draw of the plan")
    parser.add_argument(
        "--only", help="nothing but the cases in this file of JSON lines; rows of an earlier run will do"
    )
    options = parser.parse_args(arguments)
    began = time.monotonic()
    deadline = began + options.limit_s
    os.makedirs(options.out, exist_ok=True)
    rows, constant = (Sheet(os.path.join(options.out, name)) for name in ("rows.jsonl", "constants.jsonl"))
    with open(os.path.join(options.out, "cuda_ops.txt"), "w", encoding="utf-8") as file:
        file.write("\n".join(constants.ops_with_cuda_kernels()) + "\n")
    meter = DryMeter() if options.dry else Meter()
    for sheet in (rows, constant):
        finish([fresh(lambda: [constants.versions(meter)], sheet, {})])
    failed = [row["error"] for row in rows.rows() if "error" in row]
    if failed:
        print(f"no usable GPU: {failed[0]}", file=sys.stderr)
        return 1
    if options.only:
        plan = Plan(cases_in(options.only), [])
    else:
        measure_constants(meter, options.broad, constant)
        measure_first_calls(meter, options.parallel, constant)
        print(f"constants: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        others = operators.cases(options.broad) + updates.cases(options.broad)
        seed = {} if options.seed is None else {"seed": options.seed}
        plan = make_plan(options.broad, others, **seed)
    run_workers(shorten(plan) if options.dry else plan, options.parallel, deadline, options.dry, rows)
    found = rows.rows()[1:]
    errors = sum("error" in row for row in found)
    print(f"rows: {len(found)} ({errors} errors) in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return 0
