"""Measured demands of models in use, alone on a card, each with the description that a trial run would give.

    python -m carma_lab.bench.memory.cases > cases.jsonl
    python -m carma_lab.bench.gpu.demands --cases cases.jsonl --out demands.jsonl

The tasks of the interference study, those of the published traces, and cases of the memory bench, in one process one
after the other. Predicted demands are judged by it (lab/tools/fit_demand.py): nothing is fitted on these rows. Needs
torch, torchvision, transformers and NVML's binding, nothing else. Data lies on the card, so that no loader delays a
step.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import carma.trial
from carma_lab.bench.gpu.profiles import MIB, Meter, described, free_memory, measured, versions

HERE = Path(__file__)
INSIDE = Path(carma.trial.__file__).parent / "inside"
ZOO = HERE.parents[1] / "memory" / "zoo"
MOST_WARM_S, SPAN_S = 2.0, 0.9


class Named(NamedTuple):
    """`build` returns a step. The caller of the step waits for the card."""

    name: str
    group: str  # "interference", "trace", "zoo"
    family: str
    build: Callable[[], Callable[[], Any]]
    precision: str = ""  # where the caller knows; "tf32" cannot be read off a description


def interference() -> Iterator[Named]:
    from carma_lab.bench.gpu.workloads import WORKLOADS

    for one in WORKLOADS:
        yield Named(one.name, "interference", one.family, one.build, "bf16-amp" if "bf16" in one.name else "fp32")


def traces() -> Iterator[Named]:
    from carma_lab.bench.gpu.profile_tasks import TASKS

    for task in TASKS:
        yield Named(task.name, "trace", task.model, partial(_trace_step, task), "fp32")


def _trace_step(task: Any) -> Callable[[], Any]:
    steps = importlib.import_module("carma_lab.bench.gpu.profile_steps")
    usual: Callable[[], Any] = steps.build(task, steps.Place("cuda")).usual
    return usual


def zoo(lines: Sequence[str], seed: int) -> Iterator[Named]:
    """The tasks in random order: what is measured when the time is over is a fair sample."""
    cases = [json.loads(line) for line in lines]
    random.Random(seed).shuffle(cases)
    for case in cases:
        argv = case["argv"]
        precision = argv[argv.index("--precision") + 1]
        yield Named(case["id"], "zoo", case["family"], partial(_zoo_step, argv), precision)


def _zoo_step(argv: Sequence[str]) -> Callable[[], Any]:
    """One step of zoo/case.py, without what only memory asks for: accumulation, evaluation."""
    import torch

    case = importlib.import_module("case")
    args = case.options().parse_args(argv)
    torch.manual_seed(args.seed)
    case.set_precision(args.precision)
    with torch.device("cuda"):
        model, make_batch, loss_fn = case.make(args.model, args)
        batch = case.moved(make_batch(args.batch), args)
    if isinstance(loss_fn, list):
        raise ValueError("it trains several networks")
    case.prepare(args, model)
    optimizer = case.make_optimizer(args.optimizer, list(model.parameters()))
    scaler = torch.amp.GradScaler("cuda", 1.0, enabled=args.precision == "fp16-amp")

    def step() -> Any:
        with case.autocast(args):
            loss = loss_fn(model, batch)
        scaler.scale(loss).backward()
        if args.clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


class Describer:
    """The hooks of a trial run, on a real step; and which optimizer and attention were at work."""

    def __init__(self) -> None:
        from torch.nn import functional
        from torch.optim.optimizer import register_optimizer_step_post_hook

        sys.path.insert(0, str(INSIDE))
        self._rule = importlib.import_module("carma_trial.describe")
        self._facts = importlib.import_module("carma_trial.report").facts
        self._optimizers: list[Any] = []
        self._fused = False
        register_optimizer_step_post_hook(lambda one, *_: self._optimizers.append(one))
        plain = functional.scaled_dot_product_attention

        def noted(*args: Any, **words: Any) -> Any:
            self._fused = True
            return plain(*args, **words)

        functional.scaled_dot_product_attention = noted

    def describe(self, step: Callable[[], Any]) -> dict[str, Any]:
        self._optimizers.clear()
        self._fused = False
        self._rule.start()
        try:
            step()
        finally:  # hooks that stay would count, and slow down, every step from here on
            self._rule.stop()
        found = dict(self._facts.pop("described"))
        chosen = self._optimizers[-1]
        state = next((kept for kept in chosen.state.values() if isinstance(kept, dict)), {})
        found["layers"] = [{key: value for key, value in layer.items() if key != "name"} for layer in found["layers"]]
        found["optimizer"] = type(chosen).__name__
        found["optimizer_slots"] = sum(1 for value in state.values() if getattr(value, "ndim", 0) > 0)
        found["attention"] = "sdpa" if self._fused else "eager" if found.get("heads") else ""
        self._optimizers.clear()
        return found


class Study:
    def __init__(self, meter: Meter, limit_s: float) -> None:
        self._meter, self._until = meter, time.monotonic() + limit_s
        self._describer = Describer()

    def row(self, task: Named) -> dict[str, Any]:
        import torch

        row: dict[str, Any] = {
            "name": task.name, "group": task.group, "family": task.family, "precision": task.precision,
        }  # fmt: skip
        try:
            torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, True
            step = task.build()
            description = self._describer.describe(step)
            description["checkpointing"] = bool(description.get("checkpointing"))
            span = measured(self._meter, step, lambda _: torch.cuda.synchronize(), MOST_WARM_S, SPAN_S)
            row |= {"step_ms": span.step_ms, **span.shown}
            row |= {"footprint_mib": self._meter.own_mib(), "reserved_mib": torch.cuda.max_memory_reserved() // MIB}
            row["described"] = description
        except Exception as error:
            row["error"] = described(error)
        return row

    def run(self, tasks: Iterator[Named], out: Path, done: set[str]) -> int:
        count = 0
        with out.open("a", encoding="utf-8") as file:
            for task in tasks:
                if time.monotonic() > self._until:
                    break
                if task.name in done:
                    continue
                row = self.row(task)
                file.write(json.dumps(row, separators=(",", ":")) + "\n")
                file.flush()
                count += 1
                result = row.get("error") or f"{row['step_ms']:.1f} ms, SM {row['sm_active']:.2f}"
                print(f"{task.name}: {result}", flush=True)
                free_memory()
        return count


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m carma_lab.bench.gpu.demands", description=__doc__)
    parser.add_argument("--cases", type=Path, help="of python -m carma_lab.bench.memory.cases")
    parser.add_argument("--out", type=Path, default=Path("demands.jsonl"), help="a row a line; what is there is kept")
    parser.add_argument("--limit", type=float, default=500.0, help="seconds (default: 500)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, str(ZOO))
    meter = Meter()
    done: set[str] = set()
    if args.out.exists():
        done = {json.loads(line).get("name", "") for line in args.out.read_text(encoding="utf-8").splitlines()}
    else:
        head = {"about": {"command": "python -m carma_lab.bench.gpu.demands", **meter.about(), **versions(torch)}}
        args.out.write_text(json.dumps(head) + "\n", encoding="utf-8")
    study = Study(meter, args.limit)

    def tasks() -> Iterator[Named]:
        yield from interference()
        yield from traces()
        yield from zoo(args.cases.read_text(encoding="utf-8").splitlines(), args.seed) if args.cases else ()

    print(f"{study.run(tasks(), args.out, done)} rows in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
