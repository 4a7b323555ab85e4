"""Demand of each task of the published traces when it runs alone on a card: `python -m carma_lab.bench.gpu.profiles`.

All in one process, one task after the other; the file is whole after each. Needs torch, torchvision, transformers and
NVML's Python binding, nothing else: it is made to be run where nothing can be installed. As in the authors' scripts the
loss is read after each step, so that the processor does not run ahead; the data lies on the card already, so what is
measured is a step without its loader (lab/tools/profile_tables.py puts it in).
"""

from __future__ import annotations

import time

BEGAN = time.monotonic()  # before anything heavy is imported: what importing takes is part of the record

import argparse  # noqa: E402
import contextlib  # noqa: E402
import gc  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import platform  # noqa: E402
import shlex  # noqa: E402
import sys  # noqa: E402
import traceback  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, NamedTuple  # noqa: E402

from carma.trial.inside.carma_measure.gpu_counters import GPM_METRICS, GpuCounters  # noqa: E402
from carma_lab.bench.gpu.profile_tasks import TASKS, Task  # noqa: E402

WARM_S, MOST_WARM_S = 0.4, 1.5
WARM_STEPS = 3
LEAST_S = 1.0  # a shorter span than this says little
ERROR_CHARS = 400


class Span(NamedTuple):
    steps: int
    seconds: float
    host_s: float  # of it, enqueueing
    cpu_s: float
    shown: dict[str, float | None]
    clocks: dict[str, int | None]

    @property
    def step_ms(self) -> float:
        return 1000.0 * self.seconds / self.steps


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m carma_lab.bench.gpu.profiles", description=__doc__)
    parser.add_argument("--out", default="profiles.json", help="where to write (default: profiles.json)")
    parser.add_argument("--seconds", type=float, default=2.5, help="measured span of a task (default: 2.5)")
    parser.add_argument(
        "--limit", type=float, default=170.0, help="seconds for all; spans shrink to fit (default: 170)"
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="these tasks (repeatable)")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: cuda)")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try it out without a GPU")
    parser.add_argument("--list", action="store_true", help="print the names of the tasks and end")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = options().parse_args(argv)
    tasks = [task for task in TASKS if not args.only or task.name in args.only]
    unknown = set(args.only) - {task.name for task in TASKS}
    if unknown:
        print(f"There is no task {sorted(unknown)[0]!r}; --list prints them.", file=sys.stderr)
        return 2
    if args.list:
        print("\n".join(task.name for task in tasks))
        return 0
    return Study(args, Meter(), list(argv) if argv is not None else sys.argv[1:]).run(tasks)


class Study:
    """The rows so far. A task that fails leaves its reason in its row and does not stop the others."""

    def __init__(self, args: argparse.Namespace, meter: Meter, argv: Sequence[str]) -> None:
        self.rows: list[dict[str, Any]] = []
        self._args, self._meter, self._argv = args, meter, argv
        self._about: dict[str, Any] = {}
        self._used_before_mib: int | None = None
        self._spent_s: list[float] = []  # beside the measured span, by task

    def run(self, tasks: Sequence[Task]) -> int:
        self._about = self._begin()
        for place, task in enumerate(tasks):
            self.rows.append(self._row(task, left=len(tasks) - place))
            self._write()
            print(json.dumps(self.rows[-1]), flush=True)
        self._about["took_s"] = _elapsed_s()
        self._write()
        failed = [row["name"] for row in self.rows if "error" in row]
        print(f"{len(self.rows) - len(failed)} of {len(tasks)} measured in {_elapsed_s():.0f} s, in {self._args.out}")
        if failed:
            print(f"not measured: {', '.join(failed)}")
        return 0 if len(failed) < len(tasks) else 1

    def _begin(self) -> dict[str, Any]:
        """Idle power before the context and with it, and how long it takes to get there."""
        self._used_before_mib = self._meter.used_mib()
        first = self._meter.mark()
        import torch

        torch.set_num_threads(1)  # the card does the work
        importlib.import_module("carma_lab.bench.gpu.profile_steps")
        import_s, idle = _elapsed_s(), self._meter.between(first, self._meter.mark(end=True))
        if self._args.device != "cpu":
            torch.zeros(1, device=self._args.device)
            self._wait()
        context_s = _elapsed_s() - import_s
        first = self._meter.mark()
        if self._args.device != "cpu":
            time.sleep(0.6)
        held = self._meter.between(first, self._meter.mark(end=True))
        return {
            "command": shlex.join(["python", "-m", "carma_lab.bench.gpu.profiles", *self._argv]),
            **self._meter.about(),
            **versions(torch),
            "idle_w": idle["power_w"],
            "context_idle_w": held["power_w"],
            "import_s": import_s,
            "context_s": context_s,
            "context_mib": self._beyond(self._meter.used_mib()),
        }

    def _row(self, task: Task, left: int) -> dict[str, Any]:
        row: dict[str, Any] = {"name": task.name, "model": task.model, "batch": task.batch, "gpus": task.gpus}
        began = _elapsed_s()
        over_s = max(self._spent_s[-6:], default=0.0)
        if self._args.limit - began < LEAST_S + over_s:
            return {**row, "error": "no time was left"}
        fair_s = (self._args.limit - began) / left - sum(self._spent_s) / max(1, len(self._spent_s))
        span_s = max(min(LEAST_S, self._args.seconds), min(self._args.seconds, fair_s))
        try:
            row |= self._measured(task, span_s)
        except Exception as error:
            row["error"] = described(error)
        free_memory()
        self._spent_s.append(_elapsed_s() - began - row.get("seconds", 0.0))
        return row

    def _measured(self, task: Task, span_s: float) -> dict[str, Any]:
        steps_module = importlib.import_module("carma_lab.bench.gpu.profile_steps")
        began = _elapsed_s()
        steps = steps_module.build(task, steps_module.Place(self._args.device, self._args.tiny))
        self._wait()
        build_s = _elapsed_s() - began
        began = _elapsed_s()
        steps.largest().item()
        first_step_s = _elapsed_s() - began
        span = measured(self._meter, steps.usual, lambda loss: loss.item(), MOST_WARM_S, span_s)
        return {
            "steps": span.steps,
            "seconds": span.seconds,
            "step_ms": span.step_ms,
            "host_ms": 1000.0 * span.host_s / span.steps,
            "cpu": span.cpu_s / span.seconds,
            **span.shown,
            **span.clocks,
            **self._memory(),
            "build_s": build_s,
            "first_step_s": first_step_s,
        }

    def _memory(self) -> dict[str, Any]:
        used_mib = self._beyond(self._meter.used_mib())
        if self._args.device == "cpu":
            return {"allocated_mib": None, "reserved_mib": None, "used_mib": used_mib, "own_mib": None}
        import torch

        return {
            "allocated_mib": torch.cuda.max_memory_allocated() // MIB,
            "reserved_mib": torch.cuda.max_memory_reserved() // MIB,
            "used_mib": used_mib,
            "own_mib": self._meter.own_mib(),
        }

    def _beyond(self, used_mib: int | None) -> int | None:
        """Memory of the card that this process took: no other process uses the card."""
        return None if used_mib is None or self._used_before_mib is None else used_mib - self._used_before_mib

    def _wait(self) -> None:
        if self._args.device != "cpu":
            import torch

            torch.cuda.synchronize()

    def _write(self) -> None:
        """A row a line; the old file stays until the new one is whole."""
        lines = ",\n".join("  " + json.dumps(_rounded(row)) for row in self.rows)
        head = json.dumps({"about": _rounded(self._about)}, indent=1).removesuffix("\n}")
        beside = Path(f"{self._args.out}.part")
        beside.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")
        os.replace(beside, self._args.out)


def versions(torch: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version()}
    for name in ("torchvision", "transformers"):
        module = sys.modules.get(name)
        if module is None:
            from importlib import metadata

            with contextlib.suppress(Exception):
                found[name] = metadata.version(name)
        else:
            found[name] = module.__version__
    found["cudnn"] = torch.backends.cudnn.version()
    found["tf32"] = {
        "convolutions": torch.backends.cudnn.allow_tf32,
        "matrix_products": torch.backends.cuda.matmul.allow_tf32,
    }
    return {**found, "cores": os.cpu_count(), "date": time.strftime("%Y-%m-%d")}


def measured(
    meter: Meter, launch: Callable[[], Any], wait: Callable[[Any], object], most_warm_s: float, span_s: float
) -> Span:
    """Warms up, then measures. `launch` enqueues a step, and `wait` waits for what it returned."""
    began, steps = time.monotonic(), 0
    while (spent_s := time.monotonic() - began) <= most_warm_s and (spent_s <= WARM_S or steps < WARM_STEPS):
        wait(launch())
        steps += 1
    host_s, steps, cpu_s = 0.0, 0, time.process_time()
    first = meter.mark()
    while not steps or time.monotonic() - first.at < span_s:
        began = time.monotonic()
        launched = launch()
        host_s += time.monotonic() - began
        wait(launched)
        steps += 1
    last = meter.mark(end=True)
    clocks = meter.clocks_mhz()
    shown = meter.between(first, last)
    return Span(steps, last.at - first.at, host_s, time.process_time() - cpu_s, shown, clocks)


def free_memory() -> None:
    """Frees memory before the next task. A task that failed may have left the device unusable for a while."""
    import torch

    gc.collect()
    with contextlib.suppress(Exception):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def described(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"[:ERROR_CHARS]


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    return round(value, 5) if isinstance(value, float) else value


def _elapsed_s() -> float:
    return time.monotonic() - BEGAN


METRICS = {**GPM_METRICS, "fp32_active": "NVML_GPM_METRIC_FP32_UTIL"}
MIB = 1 << 20


class Meter(GpuCounters):
    """The first GPU. Without NVML every figure is None, and `why` says what is missing."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        super().__init__(metrics=METRICS, monotonic=monotonic)
        self.open_gpm()

    def used_mib(self) -> int | None:
        """Used memory of the whole GPU."""
        used = self.used_bytes()
        return None if used is None else used // MIB

    def own_mib(self) -> int | None:
        """Footprint of this process."""
        own, _ = self.own_bytes()
        return None if own is None else own // MIB

    def clocks_mhz(self) -> dict[str, int | None]:
        kinds = {"sm_mhz": "NVML_CLOCK_SM", "memory_mhz": "NVML_CLOCK_MEM"}
        return {
            name: self.ask("nvmlDeviceGetClockInfo", getattr(self.nvml, kind, None)) for name, kind in kinds.items()
        }

    def about(self) -> dict[str, Any]:
        limit_mw = self.ask("nvmlDeviceGetEnforcedPowerLimit")
        clock = getattr(self.nvml, "NVML_CLOCK_SM", None)
        name = self.ask("nvmlDeviceGetName")
        return {
            "gpu": name.decode() if isinstance(name, bytes) else name,
            "driver": self.driver_version(),
            "power_limit_w": None if limit_mw is None else limit_mw / 1000.0,
            "most_sm_mhz": self.ask("nvmlDeviceGetMaxClockInfo", clock),
            "missing": self.why or None,
        }


if __name__ == "__main__":
    sys.exit(main())
