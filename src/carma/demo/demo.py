"""`carma demo`: the same trace with exclusive GPUs and with collocation, side by side, faster than real time.

Two private daemons run at once. At a speed of several hundred a real second is minutes of the trace, while looking
at a GPU and starting a process still take real time. So the daemons of the demo sample every 0.15 real seconds, and
their window and warm-up, which count virtual seconds, are stretched until a window holds a few samples
(`fast_settings`). What starting a process costs shows as a slowdown above 1.0 of exclusive tasks.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from carma.core.model.values import Record
from carma.demo import report
from carma.demo.live_view import REFRESH_S, View, choose
from carma.demo.replay import Progress, Replay, Replayed, Stopped
from carma.testing.private_daemon import PrivateDaemon, PrivateSettings, ending_in_order
from carma.traces import Trace, find

DEFAULT_SPEED = 480.0
SAMPLE_S = 0.15  # real seconds


class Options(Record, frozen=True, kw_only=True):
    """What `carma demo` can be told. `trace` is a shipped trace's name or a file's path."""

    trace: str = "t1"
    speed: float = DEFAULT_SPEED
    policy: str = "magm"
    gpus: int = 4
    gpu_memory_mib: int = 40_960
    json: bool = False
    keep: bool = False


def run(options: Options) -> int:
    """The whole demo; the exit code is 0 when every task of both runs succeeded."""
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
        results = _both(replays, stop, choose(json=options.json))
    print(_closing(options, trace, results, time.monotonic() - began, kept))
    return 0 if all(result.figures.succeeded == result.figures.tasks for result in results) else 1


def fast_settings(speed: float) -> dict[str, dict[str, object]]:
    """Time constants for a daemon at `speed`: at real speed they are the ordinary ones."""
    sample_s = SAMPLE_S * speed  # what one sample spans, in virtual seconds
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


def _both(replays: tuple[Replay, Replay], stop: threading.Event, view: View) -> tuple[Replayed, Replayed]:
    """Runs both at once. The first error, or Ctrl-C, stops the other."""
    with ThreadPoolExecutor(max_workers=2) as pool, view:
        futures = [pool.submit(replay.run) for replay in replays]
        try:
            while not all(future.done() for future in futures):
                view.update(_progress(replays))
                time.sleep(REFRESH_S)
                if any(future.done() and future.exception() is not None for future in futures):
                    stop.set()
            view.update(_progress(replays))
        except KeyboardInterrupt:
            print("\nstopping: the private daemons and their tasks are being ended", file=sys.stderr)
            raise
        finally:
            stop.set()
    return _results(futures)


def _results(futures: list[Future[Replayed]]) -> tuple[Replayed, Replayed]:
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, Stopped)):
        raise error
    first, second = (future.result() for future in futures)
    return first, second


def _progress(replays: tuple[Replay, ...]) -> tuple[Progress, ...]:
    return tuple(replay.progress for replay in replays)


def _opening(trace: Trace, options: Options) -> str:
    return (
        f"{len(trace.tasks)} tasks of trace {trace.name.removesuffix('.csv')} as real processes on {options.gpus} "
        f"virtual GPUs of {options.gpu_memory_mib / 1024:g} GiB, {options.speed:g} times faster than real time.\n"
        f"Two private daemons, side by side: one with exclusive GPUs, one that collocates ({options.policy})."
    )


def _closing(
    options: Options, trace: Trace, results: tuple[Replayed, Replayed], real_s: float, kept: tuple[str, ...]
) -> str:
    exclusive, collocated = (result.figures for result in results)
    if options.json:
        answer = {
            "trace": trace.name,
            "source": trace.source,
            "tasks": len(trace.tasks),
            "gpus": options.gpus,
            "gpu_memory_mib": options.gpu_memory_mib,
            "speed": options.speed,
            "policy": options.policy,
            "real_s": round(real_s, 1),
            "exclusive": report.with_old_names(msgspec.to_builtins(exclusive)),
            "collocated": report.with_old_names(msgspec.to_builtins(collocated)),
            "change_percent": report.with_old_names(report.changes(exclusive, collocated)),
            "published_percent": report.with_old_names(report.PUBLISHED_PERCENT),
            "kept": kept,
        }
        return msgspec.json.format(msgspec.json.encode(answer), indent=2).decode()
    header = report.Row("", "exclusive", options.policy, "change", "published")
    parts = ["", report.plain_table(header, report.rows(exclusive, collocated)), "", _notes(options, results, real_s)]
    parts += [f"Kept: {home}" for home in kept]
    return "\n".join([*parts, "", next_steps()])


def next_steps() -> str:
    """Three commands that work as they stand, also from an environment that is not on the PATH."""
    carma, python = (_spelled(name) for name in ("carma", "python"))
    return "\n".join(
        (
            "Try next:",
            f"  {carma} up --virtual-gpus 4 --detach",
            f"  {carma} submit --gpu-mem 4GiB -- {python} -m carma.vgpu.virtual_task --memory-mib 3934 --sm 0.45 "
            "--dram 0.2 --seconds 30",
            f"  {carma} explain 1",
            "A daemon on virtual GPUs (without the flag: on your real ones), a task, and why the task is where it is.",
        )
    )


def _spelled(name: str) -> str:
    """A program of this environment as the user must write it: its name if the PATH leads to it, else its path."""
    ours = Path(sys.executable).parent / name
    if not ours.exists() or shutil.which(name) == str(ours):
        return name
    with contextlib.suppress(ValueError):
        return str(ours.relative_to(Path.cwd()))
    return str(ours)


def _notes(options: Options, results: tuple[Replayed, Replayed], real_s: float) -> str:
    lines = [
        f"Times are of the trace ({options.speed:g} x real time); all of it took {real_s:.0f} s. Published: CARMA's "
        "abstract, real A100s, its best policy.",
        "Memory and run times are published ones; how busy each task keeps a GPU, and how tasks slow each other "
        "down, is a model.",
        "Starting a process takes real time, so exclusive tasks too are a little slower than alone: that is the "
        "price of the speed.",
    ]
    failed = sum(result.figures.tasks - result.figures.succeeded for result in results)
    if failed:
        lines.append(f"{failed} tasks did not succeed; see them with --keep and carma history.")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run(Options()))
