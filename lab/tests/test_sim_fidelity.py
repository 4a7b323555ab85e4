"""A recorded run, played again: what is worked out from its file, and how far the simulator is off."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from carma.cli import carma
from carma.core.model.values import Activity, Demand
from carma.core.scheduling.sharing_model import progress_rates
from carma.traces import Trace
from carma_lab.runs.figures import Ran, TaskRun, figures
from carma_lab.runs.record import GpuOf, Run, Server, write
from carma_lab.simulator.fidelity import fidelity, known_from
from carma_lab.simulator.fidelity_replay import Replay
from carma_lab.simulator.fidelity_solo import Known, Meters, solos
from carma_lab.simulator.request import Request, recorded
from carma_lab.traces.writer import write as write_trace
from lab_fixtures.small_simulations import row, trace

TOLD = Meters(None, ramp_is_idle=False, engine="never")
MIXED = trace(
    row(0.0, name="a", memory_mib=8_000, seconds=600.0, sm_active=0.40, start_s=8.0, ramp_s=20.0),
    row(5.0, name="b", memory_mib=9_000, seconds=500.0, sm_active=0.60, dram_active=0.3, start_s=8.0, ramp_s=20.0),
    row(10.0, name="c", seconds=300.0, sm_active=0.20, dram_active=0.1, start_s=8.0, ramp_s=20.0),
    row(20.0, name="d", gpus=2, seconds=800.0, sm_active=0.50, start_s=8.0, ramp_s=20.0),
    row(90.0, name="e", memory_mib=6_000, seconds=400.0, sm_active=0.35, start_s=8.0, ramp_s=20.0),
    row(230.0, name="f", memory_mib=12_000, seconds=600.0, sm_active=0.70, dram_active=0.35, start_s=8.0),
)


def simulated(policy: str = "magm", of: Trace = MIXED, **more: object) -> Run:
    asked = Request(trace=of.name, policy=policy, gpus=2, **more)  # type: ignore[arg-type]
    return recorded(asked, of)


def forgotten(run: Run) -> Run:
    """Without the trace's demands of tasks alone."""
    return replace(run, tasks=tuple(replace(task, alone_s=None, demand=None) for task in run.tasks))


def error_of(found: object, name: str) -> float:
    return next(gap.error for gap in found.figures if gap.figure == name)  # type: ignore[attr-defined, no-any-return]


# What tasks are alone.


def ran(begin: float, end: float, gpus: tuple[int, ...] = (0,), sm: float = 0.5, **more: object) -> Ran:
    given: dict[str, object] = {"started_at": begin - 2.0, "used_s": end - begin, "outcome": "succeeded", **more}
    seen = Activity(sm_active=sm, sm_occupancy=0.2, dram_active=0.2)
    return Ran(gpus=gpus, placed_at=begin - 3.0, ended_at=end, activity=seen, **given)  # type: ignore[arg-type]


def task(number: int, *attempts: Ran, alone_s: float | None = None, outcome: str = "succeeded") -> TaskRun:
    return TaskRun(
        task=number,
        name=f"task-{number}",
        user="",
        gpus=len(attempts[-1].gpus),
        arrival_s=0.0,
        ended_s=attempts[-1].ended_at,
        alone_s=alone_s,
        attempts=attempts,
        outcome=outcome,
    )


def test_work_is_summed_up_piece_by_piece_at_the_rates_of_those_who_were_there() -> None:
    """The first is alone from 0 to 40, with the second until 100, and alone again until 120."""
    demands = (Demand(0.6, 0.2, 0.2), Demand(0.4, 0.2, 0.2))
    rates = progress_rates(demands)
    first_s, second_s = 60.0 + 60.0 * rates[0], 60.0 * rates[1]
    shown = (0.6 * first_s / 120.0, 0.4 * second_s / 60.0)  # what each showed on average
    tasks = [task(1, ran(0.0, 120.0, sm=shown[0])), task(2, ran(40.0, 100.0, sm=shown[1]))]
    scale = [first_s / 120.0, second_s / 60.0]
    tasks = [
        replace(one, attempts=(replace(one.attempts[0], activity=Activity(
            sm_active=shown[place], sm_occupancy=0.2 * scale[place], dram_active=0.2 * scale[place])),))
        for place, one in enumerate(tasks)
    ]  # fmt: skip
    first, second = solos(tasks, "mps", TOLD)
    assert (first.seconds, second.seconds) == pytest.approx((2.0 + first_s, 2.0 + second_s), rel=1e-4)
    assert (first.demand.sm_active, second.demand.sm_active) == pytest.approx((0.6, 0.4), rel=1e-4)
    assert (first.how, second.how, first.start_s) == ("inferred", "inferred", 2.0)


def test_one_that_was_alone_took_what_it_takes_alone() -> None:
    elsewhere = task(3, ran(0.0, 150.0, (1,)))
    first, second, _ = solos([task(1, ran(0.0, 100.0)), task(2, ran(100.0, 150.0)), elsewhere], "mps", TOLD)
    assert (first.seconds, first.rate, first.how) == (102.0, 1.0, "alone")
    assert (second.seconds, second.demand.sm_active) == (52.0, 0.5)


def test_one_on_two_gpus_went_at_the_slower() -> None:
    wide, beside = solos([task(1, ran(0.0, 100.0, (0, 1))), task(2, ran(0.0, 100.0, (1,)))], "mps", TOLD)
    pair, other = solos([task(1, ran(0.0, 100.0)), task(2, ran(0.0, 100.0))], "mps", TOLD)
    assert wide.rate == pytest.approx(pair.rate)
    assert beside.rate == pytest.approx(other.rate)


def test_only_the_last_attempt_counts_and_the_others_were_neighbours() -> None:
    again = task(1, ran(0.0, 50.0, outcome="out_of_memory"), ran(60.0, 160.0))
    beside = task(2, ran(0.0, 50.0))
    first, second = solos([again, beside], "mps", TOLD)
    assert (first.seconds, first.how) == (102.0, "alone")
    assert second.rate < 1.0


def test_a_task_that_never_used_a_gpu_slowed_no_other_task() -> None:
    host = task(1, replace(ran(0.0, 100.0), used_s=0.0, activity=None))
    first, second = solos([host, task(2, ran(0.0, 100.0))], "mps", TOLD)
    assert (first.seconds, first.start_s, second.rate) == (102.0, 102.0, 1.0)


def test_what_is_known_from_elsewhere_goes_before_what_is_worked_out() -> None:
    tasks = [task(1, ran(0.0, 100.0)), task(2, ran(0.0, 100.0), alone_s=70.0)]
    known = {"task-1": Known(seconds=80.0, demand=Demand(0.3, 0.1, 0.1))}
    first, second = solos(tasks, "mps", TOLD, known)
    assert (first.seconds, first.how, first.demand.sm_active) == (80.0, "given", 0.3)
    assert (second.seconds, second.how) == (70.0, "given")


# The run again.


def test_speeds_are_held_against_how_long_tasks_took_where_it_is_given_how_long_they_take_alone() -> None:
    told = fidelity(simulated("magm"))
    shared = [task for task in told.tasks if task.rate < 0.95]
    assert shared
    for task in told.tasks:
        assert task.seen == pytest.approx(task.rate, abs=0.03), "a simulated run keeps to the model"
    assert told.speed_error is not None
    assert told.speed_error < 0.02
    unknown = fidelity(forgotten(simulated("magm")))
    assert unknown.speed_error is None
    assert {task.seen for task in unknown.tasks} == {None}


@pytest.mark.parametrize("policy", ["exclusive", "magm"])
def test_a_simulated_run_is_reproduced_without_the_demands_of_the_trace(policy: str) -> None:
    found = fidelity(forgotten(simulated(policy)))
    for name in ("makespan_s", "completion_mean_s", "sm_active_mean", "memory_mib_mean", "energy_j"):
        assert abs(error_of(found, name)) < 1e-3, name
    assert found.task_p90 < 1e-3
    assert found.met
    rows = {one.name: one.seconds for one in MIXED.tasks}
    assert {one.name: one.solo_s for one in found.tasks} == pytest.approx(rows, rel=1e-3)
    assert found.solo == ({"alone": 6} if policy == "exclusive" else {"inferred": 6})


@pytest.mark.parametrize("name", ["t1", "heavy"])
def test_a_shipped_trace_is_found_again(name: str) -> None:
    """Four tasks on a GPU, tasks that leave one of their GPUs idle, engine activity and power: with all that its own
    file tells."""
    found = fidelity(recorded(Request(trace=name, policy="magm", gpus=4)))
    assert max(abs(gap.error) for gap in found.figures if gap.error is not None) < 1e-3
    assert found.task_p90 < 1e-3


def test_tasks_that_run_out_of_memory_do_so_again() -> None:
    tight = trace(*(row(10.0 * place, name=f"t{place}", memory_mib=25_000, ramp_s=60.0) for place in range(4)))
    run = simulated(of=tight, memory="none")
    found = fidelity(forgotten(run))
    gap = next(gap for gap in found.figures if gap.figure == "ooms")
    assert gap.real == gap.simulated
    assert gap.real is not None
    assert gap.real > 0
    assert gap.error is None


def test_solo_times_come_from_a_table_or_from_a_run_in_which_tasks_were_alone(tmp_path: Path) -> None:
    write(forgotten(simulated("exclusive")), tmp_path / "exclusive.json")
    known = known_from(tmp_path / "exclusive.json")
    assert {name: one.seconds for name, one in known.items()} == pytest.approx(
        {one.name: one.seconds for one in MIXED.tasks}
    )
    found = fidelity(forgotten(simulated("magm")), known)
    assert found.solo == {"given": 6}
    assert found.task_p90 < 1e-3
    twice = trace(row(0.0, name="x", seconds=100.0), row(500.0, name="x", seconds=300.0), row(900.0, name="y"))
    write(simulated("exclusive", of=twice), tmp_path / "twice.json")
    assert set(known_from(tmp_path / "twice.json")) == {"y"}, "a name for runs of two lengths tells nothing"


def test_gpus_that_are_not_known_have_no_energy_and_their_own_memory() -> None:
    run = forgotten(simulated())
    assert run.server is not None
    others = tuple(replace(gpu, name="Some Card") for gpu in run.server.gpus)
    replay = Replay(replace(run, server=replace(run.server, gpus=others)))
    assert [card.memory_mib for card in replay.cards] == [40_960, 40_960]
    assert not replay.power_known
    virtual = GpuOf(gpu="VGPU-0", index=0, name="Virtual GPU 8 GiB", memory_mib=8_192, kind="virtual")
    made = Replay(replace(run, server=replace(run.server, gpus=(virtual, replace(virtual, gpu="VGPU-1", index=1)))))
    assert made.power_known
    assert made.cards[0].power_w(Demand(0.0, 0.0, 0.0)) == 55.0
    assert made.mechanism == "mps"


def test_a_real_servers_watchdog_is_there_and_its_gpus_were_looked_at_before_the_first_task() -> None:
    run = forgotten(simulated())
    real = Replay(replace(run, about=replace(run.about, simulated=False)))
    assert real.simulation.rules.sharing.watchdog
    assert real.simulation.trace.tasks[0].arrival_s == 60.0 + 2 * 5.0
    off = replace(run.about, simulated=False, settings={"sharing.watchdog": "no"})
    assert not Replay(replace(run, about=off)).simulation.rules.sharing.watchdog
    assert not Replay(run).simulation.rules.sharing.watchdog
    assert Replay(run).simulation.trace.tasks[0].arrival_s == 0.0


def test_tasks_that_never_ran_and_missing_tasks_are_reported() -> None:
    run = forgotten(simulated())
    assert run.server is not None
    gone = replace(run.tasks[-1], task=99, attempts=(), outcome="cancelled")
    found = fidelity(replace(run, tasks=(*run.tasks, gone), server=replace(run.server, unfinished=2)))
    assert len(found.tasks) == 6
    assert any("1 task that never ran is left out" in note for note in found.notes)
    assert any(
        note.startswith("2 tasks had not ended") and note.endswith("and are not included") for note in found.notes
    )


def test_both_sides_are_of_the_same_tasks() -> None:
    """One was held for an hour and never ran; another was cancelled midway, and so is among no side's mean run."""
    whole = simulated()
    assert whole.server is not None
    last_s = max(task.ended_s for task in whole.tasks)
    held = replace(whole.tasks[0], task=99, attempts=(), outcome="cancelled", ended_s=last_s + 3600.0)
    cut = replace(whole.tasks[0], outcome="cancelled")
    tasks = (cut, *whole.tasks[1:], held)
    server = replace(whole.server, gpus=tuple(replace(gpu, idle_w=50.0) for gpu in whole.server.gpus))
    old, longer = whole.figures, (last_s + 3600.0) / last_s
    assert old.energy_j is not None
    assert old.sm_active_mean is not None
    made = figures(
        tasks,
        took_s=None,
        energy_j=old.energy_j + 2 * 50.0 * 3600.0,
        power_w_mean=None,
        sm_active_mean=old.sm_active_mean / longer,
        sm_occupancy_mean=None,
        dram_active_mean=None,
        memory_mib_mean=None,
    )
    found = fidelity(replace(whole, tasks=tasks, figures=made, server=server))
    real = {gap.figure: gap.real for gap in found.figures}
    for name in ("makespan_s", "completion_mean_s", "completion_p95_s", "wait_mean_s", "sm_active_mean", "energy_j"):
        assert real[name] == pytest.approx(getattr(old, name)), name
    good = [task.ran_s for task in whole.tasks[1:]]
    assert real["run_mean_s"] == pytest.approx(sum(good) / len(good))
    assert error_of(found, "run_mean_s") == pytest.approx(0.0, abs=0.01)
    server = replace(server, gpus=tuple(replace(gpu, idle_w=None) for gpu in server.gpus))
    unknown = fidelity(replace(whole, tasks=tasks, figures=made, server=server))
    assert {gap.figure: gap.real for gap in unknown.figures}["energy_j"] is None


# As it is typed.


def typed(*words: str | Path) -> Result:
    return CliRunner().invoke(carma, ["simulate", *map(str, words)])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    write(forgotten(simulated()), tmp_path / "run.json")
    return tmp_path / "run.json"


def test_the_table_names_figures_errors_aims_and_how_solo_times_were_found(saved: Path) -> None:
    result = typed("--fidelity", saved)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    makespan = next(line.split() for line in lines if line.startswith("makespan"))
    assert makespan[-4:] == ["+0.0", "%", "5", "%"]
    assert any(line.startswith("completion of a task, median") for line in lines)
    assert "6 tasks derived from this run" in result.stdout
    assert "simulated itself" in " ".join(result.stdout.split())
    assert "circular" in result.stdout


def test_json_has_every_task_and_out_writes_the_run_again(saved: Path, tmp_path: Path) -> None:
    result = typed("--fidelity", saved, "--json", "--out", tmp_path / "again.json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["met"] is True
    assert len(told["tasks"]) == 6
    assert told["solo"] == {"inferred": 6}
    again = CliRunner().invoke(carma, ["run-report", str(tmp_path / "again.json"), "--json"])
    assert json.loads(again.stdout)["about"]["simulated"] is True


def test_a_table_of_tasks_gives_solo_times(saved: Path, tmp_path: Path) -> None:
    from carma.traces.table import Table
    from carma_lab.traces.writer import write_table

    write_table(Table(name="t", tasks={one.name: one for one in MIXED.tasks}), tmp_path / "tasks.csv")
    result = typed("--fidelity", saved, "--solo", tmp_path / "tasks.csv")
    assert result.exit_code == 0, result.output
    assert "6 tasks from another source" in result.stdout
    assert "circular" not in result.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trace", "t1"], "--trace: not with --fidelity"),
        (["--policy", "lug", "--gpus", "4"], "--policy, --gpus: not with --fidelity"),
        (["--set", "gate.enabled=no"], "--set: not with --fidelity"),
        (["--solo", "missing.json"], "missing.json: No such file"),
    ],
)
def test_what_makes_no_sense_beside_it_is_refused(saved: Path, words: list[str], said: str) -> None:
    result = typed("--fidelity", saved, *words)
    assert result.exit_code == 2
    assert said in result.stderr


def test_solo_alone_is_refused() -> None:
    result = typed("--solo", "x.csv")
    assert result.exit_code == 2
    assert "--solo needs --fidelity" in result.stderr


def test_a_file_that_lacks_something_says_what(tmp_path: Path) -> None:
    run = forgotten(simulated())
    assert run.server is not None
    blind = tuple(
        replace(one, attempts=tuple(replace(attempt, activity=None) for attempt in one.attempts)) for one in run.tasks
    )
    fewer = Server(gpus=run.server.gpus[:1], period_s=5.0)
    for changed, said in (
        (replace(run, server=None), "does not contain the GPUs of the run"),
        (replace(run, tasks=blind), "no GPU activity"),
        (replace(run, server=fewer), "GPUs that the server no longer had"),
        (replace(run, tasks=tuple(replace(one, attempts=()) for one in run.tasks)), "no task of this run ever ran"),
    ):
        write(changed, tmp_path / "lacking.json")
        result = typed("--fidelity", tmp_path / "lacking.json")
        assert result.exit_code == 2
        assert said in result.stderr


def test_a_run_without_lone_tasks_tells_no_solo_times(saved: Path) -> None:
    result = typed("--fidelity", saved, "--solo", saved)
    assert result.exit_code == 2
    assert "ran alone" in result.stderr


def test_the_trace_that_was_replayed_can_be_written_down(tmp_path: Path) -> None:
    replay = Replay(forgotten(simulated()))
    write_trace(replay.simulation.trace, tmp_path / "trace.csv")
    assert (tmp_path / "trace.csv").read_text().count("\n") >= 7
