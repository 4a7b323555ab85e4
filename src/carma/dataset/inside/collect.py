"""Measures training runs on this machine's GPU: `python collect.py configs.jsonl OUT --parallel 10 --limit-s 560`.

Run by an interpreter that has torch; CARMA is not needed. torch is imported once, then each config runs in a fork of its
own. Rows are appended to OUT/rows.jsonl as they come; run again, it goes on with what is missing. The order is shuffled, so
that an early stop leaves a fair sample. A run that was short of memory beside others is made again, alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import room  # type: ignore[import-not-found]
import rows  # type: ignore[import-not-found]

FREE_SHARE = 0.95  # of the card's free memory
GRACE_S = 20.0  # after the limit, for runs that had begun
ALONE_BATCH = 12  # so many wait to run alone before the others are let out for them
ALONE_S = 4.0  # for each of them, towards the end of the time
TELL_S = 5.0
INTERRUPTED = 130


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measures training runs on this machine's GPU.")
    parser.add_argument("configs", type=Path, help="JSON lines, as `carma dataset generate` makes them")
    parser.add_argument("out", type=Path, help="the directory of rows.jsonl")
    parser.add_argument("--parallel", type=int, default=0, help="processes side by side (10; with --activity 24)")
    parser.add_argument("--limit-s", type=float, default=560.0, help="nothing starts after it")
    parser.add_argument("--config-limit-s", type=float, default=60.0)
    parser.add_argument("--activity", action="store_true", help="step time, SM activity, power too; alone, in turn")
    parser.add_argument("--window-s", type=float, default=0.6, help="how long activity is watched")
    parser.add_argument("--capacity-mib", type=int, default=0, help="memory that all may take (95 %% of what is free)")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--first", type=int, default=0, help="at most so many, after shuffling")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--device", default="cuda")
    return parser


def main(argv: list[str] | None = None) -> int:
    began_s = time.monotonic()
    args = options().parse_args(argv)
    args.parallel = args.parallel or (24 if args.activity else 10)
    kept = rows.Rows(args.out, args.resume, args.activity)
    queue = [config for config in rows.read_configs(args.configs) if config["id"] not in kept.done]
    random.Random(args.seed).shuffle(queue)
    queue = queue[: args.first] if args.first else queue
    if not queue:
        print("nothing is left to measure", flush=True)
        return 0
    return collect(args, kept, queue, began_s)


def collect(args: argparse.Namespace, kept: Any, queue: list[dict[str, Any]], began_s: float) -> int:
    numbers = prepare()
    head = make_head(args)
    if args.device.startswith("cuda") and not head.get("gpu"):
        print(f"there is no GPU to measure on: {head.get('error')}", file=sys.stderr)
        return 1
    capacity_mib = args.capacity_mib or head.get("free_bytes", 1 << 60) / (1 << 20) * FREE_SHARE
    kept.write(head)
    course = (Turns if args.activity else Course)(args, kept, queue, capacity_mib, numbers, began_s)
    signal.signal(signal.SIGTERM, interrupt)
    try:
        course.run()
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        course.crew.end(course.crew.children)
        course.tell()
    return 0


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def prepare() -> Any:
    """All imports, once: forks share them. Nothing here may start CUDA, or no fork could use it."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # libraries ask for a GPU as they load; this way CUDA stays out
    import torch

    torch.set_num_threads(1)  # a pool of threads would not live on in the forks
    import crew  # noqa: F401
    import loop

    numbers = loop.random_numbers()
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
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "parallel": args.parallel,
        "steps": args.steps,
        "seed": args.seed,
        "activity": args.activity,
        "alloc_conf": os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF"),
    }


def asked_in_fork(device: str) -> dict[str, Any]:
    import measure  # type: ignore[import-not-found]

    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
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


class Course:
    """Runs side by side, as many as memory and --parallel allow."""

    def __init__(
        self, args: Any, kept: Any, queue: list[dict[str, Any]], capacity_mib: float, numbers: Any, began_s: float
    ) -> None:
        import crew

        self.args, self.kept, self.capacity_mib, self.began_s = args, kept, capacity_mib, began_s
        self.queue = list(reversed(queue))  # the next is the last
        self.alone: list[dict[str, Any]] = []
        self.total = len(queue)
        work = {name: getattr(args, name) for name in ("device", "steps", "activity", "window_s", "config_limit_s")}
        self.crew: Any = crew.Crew(work, numbers, self.take)
        self.first_s = time.monotonic()
        self.told_s = self.first_s

    def run(self) -> None:
        while self.crew.children or ((self.queue or self.alone) and not self.is_late()):
            if self.is_late():
                self.stop_waiting()
            else:
                self.start_more()
            self.grant()
            self.crew.look()
            if time.monotonic() - self.told_s > TELL_S:
                self.tell()

    def start_more(self) -> None:
        if self.is_time_for_alone():
            if not self.crew.children:
                self.start(self.alone.pop(0), alone=True)
            return
        if any(child.alone for child in self.crew.children):
            return
        spare = max(2, self.args.parallel // 3)  # those that stand ready while memory is short
        while self.queue and self.has_place(spare):
            config = self.queue.pop()
            if room.wants_all(config, self.capacity_mib):
                self.alone.append(config)
            else:
                self.start(config, alone=False)

    def has_place(self, spare: int) -> bool:
        busy = len(self.crew.children) - len(self.crew.among("waiting"))
        return busy < self.args.parallel and len(self.crew.children) < self.args.parallel + spare

    def is_time_for_alone(self) -> bool:
        """Nothing else is left, enough of them have gathered, or the time is just enough for them."""
        if not self.alone or any(child.alone for child in self.crew.children):
            return False
        if not self.crew.children and self.alone_goes_on:
            return True
        left_s = self.args.limit_s - (time.monotonic() - self.began_s)
        self.alone_goes_on = (
            not self.queue or len(self.alone) >= ALONE_BATCH or left_s < ALONE_S * len(self.alone) + GRACE_S
        )
        return self.alone_goes_on

    alone_goes_on = False

    def start(self, config: dict[str, Any], alone: bool) -> Any:
        return self.crew.start(config, room.needed_mib(config), alone)

    def grant(self) -> None:
        held = self.crew.among("running", "over")
        waiting = self.crew.among("waiting")
        idle_mib = room.CONTEXT_MIB * (len(self.crew.children) - len(held))
        used_mib = sum(child.need_mib for child in held)
        for child in room.admit(waiting, used_mib, self.capacity_mib - idle_mib):
            child.enter("running")
            child.tell("go")

    def take(self, child: Any, row: dict[str, Any]) -> None:
        again = row.pop("again", False)
        if again and not child.alone:
            self.alone.append(child.config)
        else:
            self.kept.write({"id": child.config["id"], **row, "alone": child.alone})

    def is_late(self) -> bool:
        return time.monotonic() - self.began_s > float(self.args.limit_s)

    def stop_waiting(self) -> None:
        """Whoever has not begun is let go; the others have a little time."""
        over = time.monotonic() - self.began_s > self.args.limit_s + GRACE_S
        self.crew.end(self.crew.children if over else self.crew.among("starting", "waiting"))

    def tell(self) -> None:
        self.told_s = time.monotonic()
        done, took_s = self.kept.written, self.told_s - self.first_s
        print(
            f"{done} of {self.total} in {took_s:.0f} s ({done / max(took_s, 1e-9):.1f}/s): {self.kept.measured} measured, "
            f"{self.kept.oom} out of memory, {self.kept.failed} failed, {self.total - done} left",
            flush=True,
        )


class Turns(Course):
    """For activity: a group is prepared side by side, then each trains alone while the others stand still."""

    group = 0

    def start_more(self) -> None:
        if any(child.state != "over" for child in self.crew.children):
            return
        if self.is_time_for_alone():
            chosen = [self.alone.pop(0)]
        else:
            chosen = self.next_group()
        self.group += 1
        for config in chosen:
            self.start(config, alone=len(chosen) == 1).group = self.group

    def next_group(self) -> list[dict[str, Any]]:
        ahead = self.queue[: -room.LOOK_AHEAD - 1 : -1]
        places = room.choose_group(ahead, self.args.parallel, self.capacity_mib)
        for place in reversed(places):  # those nearest to the front first, so that the others stay where they are
            del self.queue[len(self.queue) - 1 - place]
        return [ahead[place] for place in places]

    def grant(self) -> None:
        """A group fits; it only waits until the one before it has left its memory."""
        crew = self.crew
        is_done = all(child.state == "over" for child in crew.children if child.group == self.group)
        for child in crew.among("over"):
            if is_done or child.group != self.group:
                child.tell("end")
        if all(child.group == self.group for child in crew.children):
            for child in crew.among("waiting"):
                child.enter("running")
                child.tell("go")
        if not crew.among("starting", "waiting", "running", "turning"):
            for child in crew.among("prepared")[:1]:
                child.enter("turning")
                child.tell("turn")


if __name__ == "__main__":
    sys.exit(main())
