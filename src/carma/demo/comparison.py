"""`carma demo`: one trace with exclusive and with shared GPUs, at the same time, faster than real time.

Two private daemons run side by side. At a speed of several hundred one real second is minutes of the trace, but a
sample of the GPUs and the start of a process still take real time. The daemons therefore sample every 0.15 real
seconds, and their windows and warm-up times, which count virtual seconds, are longer, so that a window holds several
samples (`fast_settings`). The start of processes shows as a slowdown above 1.0 of exclusive tasks.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import shlex
import shutil
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from carma import __version__
from carma.core.model.values import Record
from carma.demo import figures
from carma.demo.figures import ReplayFigures
from carma.demo.live_view import REFRESH_S, live_view
from carma.demo.replay import Replay, Stopped
from carma.testing.private_daemon import PrivateDaemon, PrivateSettings, ending_in_order
from carma.traces import Trace, find

DEFAULT_SPEED = 480.0
SAMPLE_S = 0.15  # real seconds


class Options(Record, frozen=True, kw_only=True):
    """`trace` is the name of a shipped trace or the path of a file."""

    trace: str = "t1"
    speed: float = DEFAULT_SPEED
    policy: str = "magm"
    gpus: int = 4
    gpu_memory_mib: int = 40_960
    json: bool = False
    keep: bool = False


def run(options: Options) -> int:
    """The whole demo. Exit code 0 if all tasks of both runs succeeded."""
    trace = find(options.trace)
    if not options.json:
        print(_opening(trace, options), flush=True)
    stop = threading.Event()
    began = time.monotonic()
    with ending_in_order(), contextlib.ExitStack() as stack:
        exclusive, collocated = (
            stack.enter_context(PrivateDaemon(_settings(options, policy), keep=options.keep))
            for policy in ("exclusive", options.policy)
        )
        replays = (
            Replay("exclusive", trace, exclusive, stop),
            Replay(f"collocated ({options.policy})", trace, collocated, stop),
        )
        kept = (str(exclusive.home), str(collocated.home)) if options.keep else ()
        results = _run_both(replays, stop, silent=options.json)
    real_s = time.monotonic() - began
    print(_json(options, trace, results, real_s, kept) if options.json else _closing(options, results, real_s, kept))
    return 0 if all(result.succeeded == result.tasks for result in results) else 1


def fast_settings(speed: float) -> dict[str, dict[str, object]]:
    """Time constants of a daemon at `speed`; at real speed the ordinary ones."""
    sample_s = SAMPLE_S * speed  # virtual seconds between two samples
    return {
        "monitor": {"period_s": SAMPLE_S},
        "window": {"length_s": max(30.0, 4 * sample_s), "stale_s": max(15.0, 40 * sample_s)},
        "warmup": {
            "settle_s": max(20.0, 2 * sample_s),
            "idle_s": max(120.0, 20 * sample_s),
            "limit_s": max(600.0, 40 * sample_s),
        },
    }


def _settings(options: Options, policy: str) -> PrivateSettings:
    return PrivateSettings(
        policy=policy,
        gpus=options.gpus,
        gpu_memory_mib=options.gpu_memory_mib,
        speed=options.speed,
        settings=fast_settings(options.speed),
    )


def _run_both(
    replays: tuple[Replay, Replay], stop: threading.Event, *, silent: bool
) -> tuple[ReplayFigures, ReplayFigures]:
    """Runs both replays at once. The first error, or Ctrl-C, stops the other."""
    with ThreadPoolExecutor(max_workers=2) as pool, live_view(silent=silent) as update:
        futures = [pool.submit(replay.run) for replay in replays]
        try:
            while not all(future.done() for future in futures):
                update(tuple(replay.progress for replay in replays))
                time.sleep(REFRESH_S)
                if any(future.done() and future.exception() is not None for future in futures):
                    stop.set()
            update(tuple(replay.progress for replay in replays))
        except KeyboardInterrupt:
            print("\nstopping the private daemons and their tasks", file=sys.stderr)
            raise
        finally:
            stop.set()
    return _results(futures)


def _results(futures: list[Future[ReplayFigures]]) -> tuple[ReplayFigures, ReplayFigures]:
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, Stopped)):
        raise error
    first, second = (future.result() for future in futures)
    return first, second


def _opening(trace: Trace, options: Options) -> str:
    return (
        f"Replaying {len(trace.tasks)} tasks of trace {trace.name.removesuffix('.csv')} as real processes on "
        f"{options.gpus} virtual GPUs of {options.gpu_memory_mib / 1024:g} GiB, {options.speed:g} times faster than "
        f"real time.\nTwo private daemons run side by side: one with exclusive GPUs, one that shares GPUs with the "
        f"policy {options.policy}."
    )


def _json(
    options: Options, trace: Trace, results: tuple[ReplayFigures, ReplayFigures], real_s: float, kept: tuple[str, ...]
) -> str:
    exclusive, collocated = results
    answer = {
        "command": _command(options),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": _machine(),
        "trace": trace.name,
        "source": trace.source,
        "tasks": len(trace.tasks),
        "gpus": options.gpus,
        "gpu_memory_mib": options.gpu_memory_mib,
        "speed": options.speed,
        "policy": options.policy,
        "real_s": round(real_s, 1),
        "exclusive": figures.with_old_names(msgspec.to_builtins(exclusive)),
        "collocated": figures.with_old_names(msgspec.to_builtins(collocated)),
        "change_percent": figures.with_old_names(figures.changes(exclusive, collocated)),
        "published_percent": figures.with_old_names(figures.PUBLISHED_PERCENT),
        "kept": kept,
    }
    return msgspec.json.format(msgspec.json.encode(answer), indent=2).decode()


def _command(options: Options) -> str:
    """The command with all options that are not at their defaults."""
    flags = {"trace": "--trace", "speed": "--speed", "policy": "--policy", "gpus": "--virtual-gpus"}
    standard = Options()
    words = ["carma", "demo"]
    for name, flag in flags.items():
        if (value := getattr(options, name)) != getattr(standard, name):
            words += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    if options.gpu_memory_mib != standard.gpu_memory_mib:
        words += ["--gpu-memory", f"{options.gpu_memory_mib}MiB"]
    return shlex.join([*words, "--json"])


def _machine() -> dict[str, object]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "carma": __version__,
    }


def _closing(
    options: Options, results: tuple[ReplayFigures, ReplayFigures], real_s: float, kept: tuple[str, ...]
) -> str:
    header = figures.Row("", "exclusive", options.policy, "change", "published")
    failed = sum(result.tasks - result.succeeded for result in results)
    lines = [
        "",
        figures.plain_table(header, figures.rows(*results)),
        "",
        f"Times are virtual ({options.speed:g} x real time); the demo took {real_s:.0f} s. Published: abstract of the "
        "CARMA paper, its best policy on real A100s.",
        "Memory and run times are published measurements. The activity of tasks and their slowdown of each other are "
        "a model.",
        "The start of a process takes real time, so exclusive tasks are slower than alone too.",
        f"{failed} tasks did not succeed; run the demo with --keep and read `carma history`." if failed else None,
        *(f"Kept: {home}" for home in kept),
        "",
        next_steps(),
    ]
    return "\n".join(line for line in lines if line is not None)


def next_steps() -> str:
    """Commands that work as printed, also in an environment that is not on PATH."""
    carma, python = (_spelled(name) for name in ("carma", "python"))
    task = "carma.vgpu.virtual_task --memory-mib 3934 --sm 0.45 --dram 0.2 --seconds 30"
    return "\n".join(
        (
            "Next, start a daemon on virtual GPUs (without the option: on real ones), submit a task and see its GPU:",
            f"  {carma} up --virtual-gpus 4 --detach",
            f"  {carma} submit --gpu-mem 4GiB -- {python} -m {task}",
            f"  {carma} explain 1",
        )
    )


def _spelled(name: str) -> str:
    """A program of this environment: its name if PATH leads to it, otherwise its path."""
    ours = Path(sys.executable).parent / name
    if not ours.exists() or shutil.which(name) == str(ours):
        return name
    with contextlib.suppress(ValueError):
        return str(ours.relative_to(Path.cwd()))
    return str(ours)
