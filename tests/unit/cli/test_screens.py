"""The screens of `show`, `explain`, `report` and `gpus`, whole: their wording is in tests/wording/cli_screens.txt."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from carma.cli import carma
from carma.wire import api_types as t
from tests.golden_text import assert_wording
from tests.unit.cli.scripted_daemon import NOW, FakeDaemon, finished, gpu_view, running, task_view
from tests.unit.cli.test_report import REPORT
from tests.unit.cli.test_sharing import BUSY as ACTIVITY
from tests.unit.cli.test_sharing import MPS, WATCHDOG, shared

TOO_BUSY = "is too busy: sm_active 0.93 (cap 0.80), dram_active 0.51 (cap 0.40)"
# Points in time depend on the time zone.
_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d(:\d\d)?")
ESTIMATE = t.EstimateView(
    footprint_mib=12_000,
    upper_mib=12_700,
    source="trace",
    seconds=8.0,
    level=0.99,
    allocated_mib=9_000,
    reserved_mib=11_264,
    steps_seen=3,
    gpu_model="NVIDIA H200",
    parts_mib={"weights": 400, "activations": 8_192, "cudnn_workspaces": 0},
    warnings=("one value was made up", "constants of another card"),
)
ALONE = t.EstimateView(
    footprint_mib=1, upper_mib=1, source="declared", runtime_s=7_500.0, demand={"sm_active": 0.85, "gr_active": 1.0}
)


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    with FakeDaemon() as fake:
        monkeypatch.setenv("CARMA_HOME", str(fake.home))
        monkeypatch.setenv("COLUMNS", "100")
        yield fake


def shrunk() -> t.TaskView:
    view = running(1, estimate=ESTIMATE, booking_mib=11_550)
    return replace(view, attempts=(replace(view.attempts[0], booking_mib=11_550, placed_mib=12_700),))


def next_need() -> t.TaskView:
    attempt = replace(running(1).attempts[0], ended_at=NOW - 30)
    return running(1, state="queued", code="PD", reason="GPU 0: " + TOO_BUSY, needs_mib=25_000, attempts=(attempt,))


def advised(task: int) -> t.TaskView:
    progress = t.ProgressView(steps=1_000, steps_per_s=8.0, alone_steps_per_s=10.0, slowdown=1.25)
    advice = "booked 12.4 GiB, used 3.1 GiB: leave --gpu-mem out, or set 4 GiB"
    return finished(
        task,
        observed_mib=3_200,
        sm_active=0.42,
        energy_j=7_200.0,
        progress=progress,
        waited_s=75.0,
        ran_s=90.0,
        advice=advice,
    )


TASKS: dict[str, t.TaskView] = {
    "failed": finished(1, code=3),
    "succeeded, with advice": advised(1),
    "estimated by a trial run, booking shrunk": shrunk(),
    "run time and demand alone": running(1, estimate=ALONE),
    "predicted demand": running(1, estimate=replace(ALONE, runtime_s=None, demand_predicted=True)),
    "waits for a retry": next_need(),
    "under MPS": shared(1, mechanism="mps", guards=(MPS, WATCHDOG), activity=ACTIVITY, energy_j=7_200.0),
    "no limit": shared(1, mechanism="timeslice", note="MPS cannot be used: it is not installed"),
    "alone, no limit": shared(1, mechanism="timeslice", alone=True),
    "requested mechanism": running(1, mechanism_asked="mps", threads_percent=20),
}


def entry(index: int, **fields: Any) -> t.ExplainEntry:
    return t.ExplainEntry(gpu=f"GPU-{index}", index=index, **fields)


def explanation(**changes: Any) -> t.Explanation:
    usual: dict[str, Any] = {"task": 1, "policy": "lug", "needs_mib": 5_120, "needs_source": "unknown", "entries": ()}
    return t.Explanation(**(usual | changes))


SCORED = (
    entry(0, accepted=True, reason="could take it", score=0.5, parts={"sm_free": 0.5, "room_mib": 1024.0}),
    entry(1, accepted=True, reason="chosen", score=0.9, parts={"sm_free": 0.9, "room_mib": 2048.0}, chosen=True),
    entry(2, accepted=False, reason=TOO_BUSY, code="Utilisation"),
)
EXPLAINED: dict[str, tuple[t.TaskView, t.Explanation]] = {
    "waits": (
        task_view(1),
        explanation(
            state="queued",
            reason="needs 12.4 GiB; most free is 9.1 GiB on GPU 2",
            needs_source="declared",
            reserved_start_at=NOW + 60,
            entries=(entry(0, accepted=False, reason="is drained: fan", code="Drained"),),
        ),
    ),
    "runs": (running(1), explanation(state="running", reason="placed on GPU 1", entries=SCORED)),
    "ended": (
        finished(1),
        explanation(
            state="finished",
            reason="failed with exit code 3",
            needs_source="recovery",
            attempt=2,
            decision="placed on GPU 0: idle",
            entries=(entry(0, accepted=True, reason="chosen", chosen=True),),
        ),
    ),
}


def screen(*words: str) -> str:
    result = CliRunner().invoke(carma, list(words))
    assert result.exit_code == 0, result.output
    return _TIME.sub("TIME", "\n".join(line.rstrip() for line in result.stdout.splitlines()))


def test_the_screens_have_the_accepted_wording(daemon: FakeDaemon) -> None:
    screens = {}
    daemon.answers["story"] = [t.StoryLine(at=NOW, event="task_submitted", text="submitted by ada")]
    for name, view in TASKS.items():
        daemon.tasks = {1: view}
        screens[f"show: {name}"] = screen("show", "1")
    for name, (view, answer) in EXPLAINED.items():
        daemon.tasks, daemon.answers["explain"] = {1: view}, answer
        screens[f"explain: {name}"] = screen("explain", "1")
    daemon.answers["report"] = REPORT
    screens["report"] = screen("report")
    daemon.answers["history"] = [advised(1), finished(2, observed_mib=None)]
    screens["history: efficiency"] = screen("history", "--efficiency")
    screens["history: efficiency, CSV"] = screen("history", "--efficiency", "--csv")
    daemon.answers["gpus"] = [gpu_view(0, state="closed", reason=TOO_BUSY), gpu_view(1)]
    screens["gpus"] = screen("gpus")
    assert_wording("cli_screens", screens)
