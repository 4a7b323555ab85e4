"""The report: what is counted, what is clipped, and that the sums agree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pytest
from msgspec.structs import replace

from carma import errors
from carma.core.model.events import AttemptEnded, UseNoted
from carma.core.model.outcome import Disrupted, Outcome, Succeeded
from carma.core.model.status import Finished
from carma.core.model.task import Attempt, Task
from carma.core.model.values import Activity, Booking, GpuId, GpuUsage, Owner, Placement, TaskId, TaskSpec
from carma.core.state import State
from carma.daemon.state_checkpoint import checkpoint
from carma.daemon.views.report import HOUR_S, Totals, full_hour, report
from carma.testing.builders import ALICE, BOB, World
from carma.wire.report_types import Report
from tests.unit.daemon.api_server import Served, serving
from tests.unit.daemon.shells import add_use

SINCE = 100 * HOUR_S
UNTIL = SINCE + 2 * HOUR_S
G0, G1 = GpuId("GPU-0"), GpuId("GPU-1")


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as made:
        yield made


def ran(
    number: int,
    *spans: tuple[float, float],
    owner: Owner = ALICE,
    gpus: tuple[GpuId, ...] = (G0,),
    energy_j: float | None = 100.0,
    used_s: float = 10.0,
    outcome: Outcome = Succeeded(),
    waited_s: float = 60.0,
) -> Task:
    """A finished task whose attempts lie there, in seconds from the beginning of the span."""
    booked = Placement(gpus=gpus, booking=Booking(memory_mib=1, source="declared"))
    attempts = tuple(
        Attempt(
            number=place,
            placement=booked,
            placed_at=SINCE + start,
            started_at=SINCE + start,
            ended_at=SINCE + end,
            outcome=outcome,
            energy_j=energy_j,
            used_s=used_s,
        )
        for place, (start, end) in enumerate(spans, start=1)
    )
    return Task(
        id=TaskId(number),
        owner=owner,
        spec=TaskSpec(command=("secret",), directory="/secret"),
        submitted_at=SINCE + spans[0][0] - waited_s,
        status=Finished(SINCE + spans[-1][1], outcome),
        attempts=attempts,
    )


def made_of(
    tasks: Iterable[Task],
    state: State,
    usage: Sequence[GpuUsage] = (),
    *,
    since: float = SINCE,
    until: float = UNTIL,
) -> Report:
    totals = Totals(since, until)
    totals.add(tasks, state)
    return report(totals, usage, state)


def test_a_users_work_is_summed_and_the_sums_agree() -> None:
    tasks = [
        ran(1, (0, 600), gpus=(G0, G1)),
        ran(2, (600, 900), (1_000, 1_100), energy_j=50.0, outcome=Disrupted("MPS ended"), waited_s=30.0),
        ran(3, (10, 20), owner=BOB, energy_j=None),
    ]
    made = made_of(tasks, World(2).state)
    alice, bob = made.users
    assert (alice.user, alice.work.ended, alice.work.attempts) == ("alice", {"disrupted": 1, "succeeded": 1}, 3)
    assert (alice.work.run_s, alice.work.gpu_s, alice.work.energy_j) == (1_000.0, 1_600.0, 200.0)
    assert (alice.work.started, alice.work.waited_s, alice.work.longest_wait_s) == (2, 90.0, 60.0)
    assert (bob.work.energy_j, bob.work.unmeasured) == (0.0, 1)
    for name in ("attempts", "run_s", "gpu_s", "energy_j", "unmeasured", "started", "waited_s"):
        assert getattr(made.total, name) == getattr(alice.work, name) + getattr(bob.work, name)
    assert made.notes[-1].startswith("the energy of 1 attempt is unknown")


def test_what_reaches_beyond_the_span_counts_with_its_part() -> None:
    made = made_of([ran(1, (-900, 300))], World(1).state)
    assert (made.total.run_s, made.total.energy_j) == (300.0, 25.0)
    assert made.total.started == 0  # it started before
    assert made.total.ended == {"succeeded": 1}
    before = made_of([ran(1, (-900, -300))], World(1).state)
    assert (before.total.attempts, before.users) == (0, ())


def test_energy_of_the_older_kind_is_not_added_to_the_newer() -> None:
    """An attempt on record without the time that its share was counted over was given all that its GPUs took."""
    made = made_of([ran(1, (0, 600), used_s=0.0), ran(2, (0, 600))], World(1).state)
    assert (made.total.energy_j, made.total.unmeasured) == (100.0, 1)


def test_a_running_task_counts_up_to_now() -> None:
    world = World(1)
    task = world.submit(1_000)
    world.settle()
    world.start()
    world.wait(30)
    made = made_of(world.state.tasks.values(), world.state, since=full_hour(world.now), until=world.now)
    assert (made.total.running, made.total.attempts, made.total.ended) == (1, 1, {})
    assert made.total.run_s == 30.0
    assert task in world.state.active


def test_gpus_are_summed_over_their_hours_with_what_is_not_stored_yet() -> None:
    world = World(2)
    row = GpuUsage(
        gpu=G0, hour=100, watched_s=3_600, held_s=1_800, shared_s=900, sm_s=900, energy_j=720_000, idle_j=360_000
    )
    add_use(world.state, [replace(row, hour=101, tasks_j=100_000), replace(row, hour=99)])  # one is before the span
    first, second = made_of((), world.state, [row]).gpus
    assert (first.index, first.watched_s, first.held_s, first.shared_s) == (0, 7_200, 3_600, 1_800)
    assert (first.sm_active, first.energy_j, first.idle_j, first.tasks_j) == (0.25, 1_440_000, 720_000, 100_000)
    assert first.power_w == 200.0
    assert (second.index, second.watched_s, second.sm_active, second.energy_j) == (1, 0.0, None, None)


def test_what_was_not_watched_is_said() -> None:
    row = GpuUsage(gpu=G0, hour=100, watched_s=HOUR_S)
    gone = GpuUsage(gpu=GpuId("GPU-gone"), hour=100)
    made = made_of((), World(2).state, [row, replace(row, hour=101), gone])
    assert made.notes == ("GPU 1, GPU-gone: observed for 0 s of 02:00:00; nothing is known of the rest",)
    assert made.gpus[-1].index is None


def test_the_report_has_all_users_and_no_commands(served: Served) -> None:
    task = served.client().submit(served.request("true", name="hush")).ids[0]
    served.estimated(task)
    key = served.place(task)
    busy = Activity(sm_active=0.4)
    served.emit(AttemptEnded(served.shell.clock.now(), key, Succeeded(), 3_000, 7_200.0, (), busy, 60.0))
    served.settle()
    now = served.shell.clock.now()
    row = GpuUsage(gpu=G1, hour=int(now // HOUR_S), watched_s=10.0, energy_j=500.0, idle_j=400.0)
    served.emit(UseNoted(now, gpus=(row,)))
    made = served.client(0).report()
    (carmad,) = made.users
    assert (carmad.user, carmad.work.ended, carmad.work.energy_j) == ("carmad", {"succeeded": 1}, 7_200.0)
    assert made.since == full_hour(made.until - 24 * HOUR_S)
    assert (made.gpus[1].watched_s, made.gpus[1].energy_j) == (10.0, 500.0)
    assert "hush" not in repr(made)
    saved, finished = checkpoint(served.shell.state, served.shell.sequence)
    served.store.save(saved, finished)
    assert served.client().report().total == made.total  # in memory and in the archive: counted once
    served.archive()
    assert served.client().report().total == made.total
    assert served.client().report(since=made.until).since == full_hour(made.until)


def test_a_span_from_the_future_or_before_time_is_no_error(served: Served) -> None:
    assert served.client().report(since=1e12).total.attempts == 0
    assert served.client().report(since=-5.0).since == 0.0
    with pytest.raises(errors.Usage, match="since"):
        served.client().report(since=float("nan"))
