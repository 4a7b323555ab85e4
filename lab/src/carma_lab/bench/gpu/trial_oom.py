"""A provoked OOM: a task exceeds its booking while three innocent tasks share its GPU, under each guard and under none.

Two innocents train. The third, the filler, has booked much of the GPU and takes it late, within its booking; so if the
grower has taken memory meanwhile, the filler fails. What must hold under each guard: only the grower is stopped, it is
recognised as out of memory, it comes back with a booking that is large enough, and everything ends well.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from carma.core.model.settings import Memory, Sharing
from carma.wire.api_types import TaskView
from carma_lab.bench.gpu.trial_server import NOT_VIRTUAL, Line, Server, Stage, Tables, Work, summary
from carma_lab.bench.gpu.trial_shapes import BY_WORKLOAD, drawn
from carma_lab.bench.results_file import rounded

INNOCENT = ("resnet18-cifar-b32", "mlp-512x4-b256")
FILLER, GROWER = "filler", "grower"
ROUND_LIMIT_S = 80.0  # one rung
SHORTEST_S = 30.0  # a rung is not begun with less
# From "go" on: the grower has all after about 6 s where nothing stops it, so the filler comes too late after about 7.
FILL_AFTER_S, FILL_PACE_S = 4.5, 0.07
GROW_PACE_S, GROW_HOLD_S = 0.06, 2.5
TRAIN_S = 10.0


class Rung(NamedTuple):
    """One way to hold the grower. `jump`: it asks for all at once instead of block by block."""

    name: str
    about: str
    mechanism: str
    caps: bool
    watchdog: bool
    jump: bool = False
    without_framework: bool = False


RUNGS: tuple[Rung, ...] = (
    Rung("mps", "MPS's memory limit; the grower drops PyTorch's own", "mps", True, True, without_framework=True),
    Rung("framework", "the framework's own limit, time slices", "timeslice", True, True),
    Rung("watchdog", "no limit, the watchdog alone, time slices", "timeslice", False, True),
    Rung("nothing", "no limit, no watchdog: for contrast", "timeslice", False, False),
    Rung("watchdog-jump", "the watchdog alone, and all at once", "timeslice", False, True, jump=True),
    Rung("mps-jump", "MPS's memory limit, and all at once", "mps", True, True, jump=True, without_framework=True),
)


class Sizes(NamedTuple):
    """Sizes in MiB, as shares of the GPU, so that the innocent tasks, the filler and the request of the growing task do
    not all fit."""

    gpu: int
    innocent: int
    filler: int
    filled: int
    grower: int
    target: int
    block: int

    @classmethod
    def of(cls, gpu_mib: int) -> Sizes:
        filler = 42 * gpu_mib // 100
        return cls(
            gpu=gpu_mib,
            innocent=max(1024, gpu_mib // 64),
            filler=filler,
            filled=filler - max(1024, gpu_mib // 50),
            grower=gpu_mib // 12,
            target=68 * gpu_mib // 100,
            block=max(64, gpu_mib // 140),  # about 1 GiB on an H200
        )


def run(stage: Stage) -> dict[str, Any]:
    """The rungs one after the other; one that fails does not keep the next from running."""
    wanted = stage.options.rungs
    return {"rounds": [_tried(stage, rung) for rung in RUNGS if not wanted or rung.name in wanted]}


def shortfalls(found: dict[str, Any]) -> list[str]:
    """An innocent one that failed, or a grower that did not come back, under a rung that should have held. One that
    there was no time for was not shown either; what virtual GPUs cannot have was never promised there."""
    short: list[str] = []
    for each in found["rounds"]:
        if "error" in each:
            short.append(f"oom, {each['rung']}: {each['error']}")
        elif "skipped" in each:
            short += [f"oom, {each['rung']}: skipped: {each['skipped']}"] if each["skipped"] != NOT_VIRTUAL else []
        elif each["rung"] != "nothing":
            short += [f"oom, {each['rung']}: {what}" for what in each["shortfalls"]]
    return short


def _tried(stage: Stage, rung: Rung) -> dict[str, Any]:
    about = {"rung": rung.name, "about": rung.about}
    if why := _skipped(stage, rung):
        stage.say(f"{rung.name}: skipped: {why}")
        return {**about, "skipped": why}
    stage.say(f"{rung.name}: {rung.about}")
    try:
        return {**about, **_round(stage, rung)}
    except Exception as error:
        stage.say(f"{rung.name}: {error}")
        return {**about, "error": f"{type(error).__name__}: {error}"}


def _skipped(stage: Stage, rung: Rung) -> str:
    """Why it is not tried, if it is not."""
    if stage.options.virtual and rung.mechanism == "mps":
        return NOT_VIRTUAL
    enough = stage.left_s >= min(SHORTEST_S, SHORTEST_S * stage.options.scale)
    return "" if enough else stage.too_little


def _round(stage: Stage, rung: Rung) -> dict[str, Any]:
    until = min(stage.until, time.monotonic() + ROUND_LIMIT_S)
    sizes = Sizes.of(stage.gpu_memory_mib)
    with Server(virtual=stage.options.virtual, settings=_settings(rung, sizes)) as server:
        works = _works(stage, rung, sizes, server)
        ids = [server.submit(work) for work in works]
        server.wait_for_line([work.name for work in works], "ready", until)
        go = time.time()
        (server.work / "go").touch()
        ended = server.wait(ids, until)
        views = {view.name: view for view in (*server.queue(), *server.history()) if view.id in ids}
        found: dict[str, Any] = rounded(_told(rung, sizes, server, views, go, ended), 4)
    names = ", ".join(f"{each['name']} ({(each['outcome'] or {}).get('kind')})" for each in found["failed"]) or "none"
    stage.say(f"{rung.name}: failed: {names}; all ended after {found['all_ended_s']} s")
    return found


def _settings(rung: Rung, sizes: Sizes) -> Tables:
    """The first booking after the failure must be enough, to save time: the ladder's many steps are not shown here.

    A limit stops the grower at its booking, where it asks for one block more: the margin has to make up for the rest.
    One that jumps tells all that it asked for, and one that the watchdog stops gets the factor.
    """
    spare_mib = max(2048, sizes.gpu // 33)
    margin_mib = sizes.target - sizes.grower + spare_mib if rung.caps and not rung.jump else spare_mib
    return {
        "gate": {"enabled": False},
        "warmup": {"enabled": False},
        "placement": {"gpus": ["0"], "tasks_per_gpu": 8},
        "sharing": {"mechanism": rung.mechanism, "caps": rung.caps, "watchdog": rung.watchdog},
        "recovery": {"backoff_s": 0.5, "growth": 9.0, "margin_mib": margin_mib},
    }


def _works(stage: Stage, rung: Rung, sizes: Sizes, server: Server) -> list[Work]:
    options = stage.options

    def work(name: str, booked_mib: int, how: str, *flags: str, **times_s: float) -> Work:
        times = [(f"--{flag.replace('_', '-')}", f"{value * options.scale:g}") for flag, value in times_s.items()]
        go = ("--go", str(server.work / "go"))
        return Work(name=name, gpu_memory_mib=booked_mib, arguments=(how, *go, *chain.from_iterable(times), *flags))

    def blocks(target_mib: int, block_mib: int) -> tuple[str, ...]:
        still = ("--sm", "0", "--dram", "0") if options.virtual else ()
        return (*still, "--target-mib", str(target_mib), "--block-mib", str(block_mib))

    small = ("--memory-mib", str(sizes.innocent - 256), "--sm", "0.1", "--dram", "0.02")
    trained = {name: small if options.virtual else drawn(BY_WORKLOAD[name], virtual=False) for name in INNOCENT}
    fill, grow = blocks(sizes.filled, sizes.block), blocks(sizes.target, sizes.target if rung.jump else sizes.block)
    loose = ("--without-framework-limit",) if rung.without_framework else ()
    return [
        *(work(name, sizes.innocent, "train", *flags, after_go_s=TRAIN_S) for name, flags in trained.items()),
        work(FILLER, sizes.filler, "grow", *fill, after_go_s=FILL_AFTER_S, pace_s=FILL_PACE_S),
        work(GROWER, sizes.grower, "grow", *grow, *loose, pace_s=GROW_PACE_S, hold_s=GROW_HOLD_S),
    ]


def _told(
    rung: Rung, sizes: Sizes, server: Server, views: dict[str, TaskView], go: float, ended: bool
) -> dict[str, Any]:
    grower, lines = views[GROWER], server.log(GROWER)
    innocents = [views[name] for name in (*INNOCENT, FILLER)]
    first = grower.attempts[0]
    over_at = _oversteps_at(lines, first.booking_mib - _context_mib(server))
    others_mib = sum(view.attempts[0].booking_mib for view in innocents)
    # As the watchdog counts: what the others have booked, and half the margin, must stay free.
    threat_at = _holds_at(lines, sizes.gpu - others_mib - _context_mib(server) - Memory().margin_mib // 2)
    stopped_at = first.ended_at if (first.outcome or {}).get("kind") != "succeeded" else None
    finished = [view.ended_at for view in views.values() if view.ended_at is not None]
    return {
        "sizes_mib": sizes._asdict(),
        "everything_ended": ended,
        "failed": _failed(views.values()),
        "grower": {
            **summary(grower),
            "story": _story(server, grower.id),
            "held_mib_by_its_own_log": max((line["taken_mib"] for line in lines if "taken_mib" in line), default=0),
        },
        "grower_over_booking_s": _since(go, over_at),
        "grower_threatens_s": _since(go, threat_at),
        "grower_stopped_s": _since(go, stopped_at),
        "stopped_after_passing_s": _since(over_at, stopped_at),
        "stopped_after_threatening_s": _since(threat_at, stopped_at),
        "innocents": [summary(view) for view in innocents],
        "all_ended_s": _since(go, max(finished)) if ended and finished else None,
        "shortfalls": _short(rung, innocents, grower),
    }


def _short(rung: Rung, innocents: Sequence[TaskView], grower: TaskView) -> list[str]:
    found = [f"{view.name} failed, and it is innocent" for view in innocents if len(view.attempts) != 1]
    found += [
        f"{view.name} did not succeed"
        for view in (*innocents, grower)
        if (view.outcome or {}).get("kind") != "succeeded"
    ]
    if rung.name != "nothing" and len(grower.attempts) < 2:
        found.append("the grower was not stopped")
    return found


def _failed(views: Iterable[TaskView]) -> list[dict[str, Any]]:
    """Every attempt that did not succeed."""
    return [
        {"name": view.name, "attempt": attempt.number, "outcome": attempt.outcome, "blame": attempt.blame}
        for view in views
        for attempt in view.attempts
        if attempt.outcome is not None and attempt.outcome.get("kind") != "succeeded"
    ]


def _story(server: Server, task: int) -> list[str]:
    """What `carma show` tells of it, from the story on."""
    _, _, story = server.call("show", str(task)).partition("\nstory")
    return [line.strip() for line in story.splitlines() if line.strip()]


def _context_mib(server: Server) -> int:
    """What a process holds beside what it takes itself; a virtual GPU has no context."""
    return 0 if server.virtual else Sharing().context_mib


def _oversteps_at(lines: Sequence[Line], booked_mib: int) -> float | None:
    """When it first asked for more than that."""
    return next((line["at"] for line in lines if line.get("mib", 0) + line.get("taken_mib", 0) > booked_mib), None)


def _holds_at(lines: Sequence[Line], mib: int) -> float | None:
    return next((line["at"] for line in lines if line["what"] == "took" and line["taken_mib"] > mib), None)


def _since(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin
