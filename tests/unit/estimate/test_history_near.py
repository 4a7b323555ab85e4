"""History beyond the same words: changed files, one number that is new, and runs that ran out of memory."""

from __future__ import annotations

import msgspec
import pytest

from carma.core.model.values import (
    Alone,
    AttemptKey,
    Demand,
    Estimate,
    Gpu,
    GpuId,
    NoEstimate,
    Owner,
    TaskId,
    TaskSpec,
)
from carma.core.ports import EstimateRequest, PastRun
from carma.estimate.combination import first_answer
from carma.estimate.declared import Declared
from carma.estimate.history import History
from carma.store.memory import MemoryStore
from carma.testing.estimator_contract import FixedEstimator

A100 = Gpu(id=GpuId("GPU-0"), index=0, name="A100", memory_mib=40_960)
ALICE = Owner(1001, 1001, "alice")


def command(batch: float, lr: str = "0.1", option: str = "--batch-size") -> tuple[str, ...]:
    return ("python", "train.py", option, f"{batch:g}", f"--lr={lr}")


def ran(batch: float, peak_mib: int | None, **changes: object) -> PastRun:
    run = PastRun(
        key=AttemptKey(TaskId(1), 1),
        uid=ALICE.uid,
        command=command(batch),
        directory="/home/alice",
        gpus=1,
        gpu_model="A100",
        peak_mib=peak_mib,
        runtime_s=100.0,
        succeeded=True,
        collocated=False,
        ended_at=1.0,
    )
    return msgspec.structs.replace(run, **changes)


def ran_out(batch: float, more_than_mib: int, **changes: object) -> PastRun:
    return ran(batch, more_than_mib - 100, succeeded=False, more_than_mib=more_than_mib, **changes)


def ask(*runs: PastRun, words: tuple[str, ...] | None = None, fingerprint: str = "") -> Estimate | NoEstimate:
    archive = MemoryStore()
    for number, run in enumerate(runs, start=1):
        key = AttemptKey(TaskId(number), 1)
        archive.remember(msgspec.structs.replace(run, key=key, ended_at=float(number)))
    spec = TaskSpec(command=words or command(64), directory="/home/alice")
    request = EstimateRequest(task=TaskId(100), owner=ALICE, spec=spec, gpus=(A100,), fingerprint=fingerprint)
    return History(archive).estimate(request)


def estimated(*runs: PastRun, words: tuple[str, ...] | None = None, fingerprint: str = "") -> Estimate:
    answer = ask(*runs, words=words, fingerprint=fingerprint)
    assert isinstance(answer, Estimate), answer
    return answer


def refused(*runs: PastRun, words: tuple[str, ...] | None = None, fingerprint: str = "") -> NoEstimate:
    answer = ask(*runs, words=words, fingerprint=fingerprint)
    assert isinstance(answer, NoEstimate), answer
    return answer


# What it runs.


def test_a_changed_script_is_another_script() -> None:
    run = ran(64, 4_000, fingerprint="before")
    assert "has changed" in refused(run, fingerprint="after").reason
    assert estimated(run, fingerprint="before").warnings == ()


def test_runs_without_a_fingerprint_of_files_still_count_and_are_named() -> None:
    answer = estimated(ran(64, 4_000), fingerprint="abc")
    assert answer.footprint_mib == 4_000
    assert answer.warnings == ("whether its files have changed since then is not known",)
    looked_at = estimated(ran(64, 9_000), ran(64, 4_000, fingerprint="abc"), fingerprint="abc")
    assert (looked_at.footprint_mib, looked_at.warnings) == (4_000, ())


def test_other_values_of_a_changed_script_say_nothing_either() -> None:
    runs = [ran(32, 3_000, fingerprint="before"), ran(128, 9_000, fingerprint="before")]
    assert "not run" in refused(*runs, fingerprint="after").reason
    assert estimated(*runs, fingerprint="before").footprint_mib == 5_000


# One number that is new.


def test_a_batch_size_between_two_that_ran() -> None:
    answer = estimated(ran(32, 3_000), ran(128, 9_000))
    assert (answer.footprint_mib, answer.upper_mib, answer.source) == (5_000, 9_450, "history")
    assert answer.warnings == (
        "--batch-size 64 was not run before: interpolated between 2.9 GiB at 32 and 8.8 GiB at 128",
    )
    assert answer.runtime_s is None  # another amount of work


def test_a_batch_size_beyond_those_that_ran_says_how_it_was_drawn() -> None:
    answer = estimated(ran(16, 2_000), ran(32, 3_000), ran(48, 4_000))
    assert answer.footprint_mib == 5_000
    assert "extrapolated from" in answer.warnings[0]
    assert answer.upper_mib > 5_250


def test_the_demand_is_that_of_the_run_with_the_nearest_number() -> None:
    light, heavy = (Alone(demand=Demand(share, share / 2, share / 2)) for share in (0.2, 0.8))
    answer = estimated(ran(32, 1_000, alone=light), ran(80, 4_000, alone=heavy), words=command(72))
    assert answer.demand == heavy.demand
    assert answer.runtime_s is None


def test_the_same_command_counts_more_than_its_neighbours() -> None:
    assert estimated(ran(32, 3_000), ran(128, 9_000), ran(64, 7_000)).footprint_mib == 7_000


def test_two_numbers_that_differ_are_too_many() -> None:
    runs = [ran(batch, 3_000, command=command(batch, lr="0.2")) for batch in (32, 128)]
    assert "differ in more than one number" in refused(*runs).reason


def test_the_number_that_most_runs_differ_in_is_the_one() -> None:
    """A learning rate that was tried as well does not stand in the way."""
    runs = [ran(32, 3_000), ran(128, 9_000), ran(64, 5_000, command=command(64, lr="0.2"))]
    assert estimated(*runs).footprint_mib == 5_000


def test_near_runs_are_of_the_servers_gpu_model_where_there_are_any() -> None:
    elsewhere = [ran(32, 9_000, gpu_model="T4"), ran(128, 20_000, gpu_model="T4")]
    assert estimated(*elsewhere, ran(32, 3_000), ran(128, 9_000)).footprint_mib == 5_000
    assert "T4" in estimated(*elsewhere).warnings[1]


def test_runs_that_failed_early_are_no_points() -> None:
    early = ran(128, 500, succeeded=False, runtime_s=3.0)
    assert "two other values" in refused(ran(32, 3_000), early).reason


# More than.


def test_one_smaller_batch_is_at_least_a_lower_bound() -> None:
    answer = refused(ran(32, 10_000))
    assert answer.more_than_mib == 9_000
    assert "it needs more than 8.8 GiB" in answer.reason
    assert refused(ran(128, 10_000)).more_than_mib is None


def test_of_a_number_that_need_not_cost_memory_no_bound_is_taken() -> None:
    words = command(64, option="--workers")
    assert refused(ran(32, 10_000, command=command(32, option="--workers")), words=words).more_than_mib is None


def test_only_runs_that_ran_out_of_memory_are_a_refusal_that_says_more_than() -> None:
    answer = refused(ran_out(64, 8_000), ran_out(64, 9_000))
    assert answer.more_than_mib == 9_000
    assert answer.reason == "2 runs ran out of memory; it needs more than 8.8 GiB"


def test_no_answer_is_at_or_below_what_was_not_enough() -> None:
    answer = estimated(ran(64, 4_000), ran_out(64, 9_000))
    assert answer.footprint_mib > 9_000
    assert answer.upper_mib >= 9_450
    assert "ran out of memory before" in answer.warnings[0]
    assert estimated(ran(64, 9_500), ran_out(64, 9_000)).warnings == ()


def test_a_smaller_batch_that_ran_out_of_memory_lifts_the_line() -> None:
    answer = estimated(ran(16, 2_000), ran(128, 9_000), ran_out(32, 8_000))
    assert answer.footprint_mib > 8_000
    larger = estimated(ran(16, 2_000), ran(128, 9_000), ran_out(256, 30_000))
    assert larger.footprint_mib == 5_000


@pytest.mark.parametrize(("mib", "wanted"), [(5_000, 9_001), (20_000, 20_000)])
def test_who_is_asked_next_answers_above_it(mib: int, wanted: int) -> None:
    knows = FixedEstimator(NoEstimate(source="history", reason="it ran out of memory", more_than_mib=9_000))
    low = Estimate(footprint_mib=mib, upper_mib=mib, source="trace", parts_mib={"weights": mib})
    request = EstimateRequest(task=TaskId(1), owner=ALICE, spec=TaskSpec(command=("x",), directory="/"), gpus=())
    answer, (refusal,) = first_answer([knows, FixedEstimator(low)], request)
    assert answer is not None
    assert answer.footprint_mib == wanted
    assert answer.upper_mib > 9_000
    assert bool(answer.warnings) == (mib < wanted)
    assert bool(answer.parts_mib) == (mib == wanted)  # they no longer add up
    assert refusal.more_than_mib == 9_000


def test_what_the_user_declared_is_not_raised() -> None:
    knows = FixedEstimator(NoEstimate(source="history", reason="it ran out of memory", more_than_mib=9_000))
    spec = TaskSpec(command=("x",), directory="/", gpu_memory_mib=5_000)
    request = EstimateRequest(task=TaskId(1), owner=ALICE, spec=spec, gpus=())
    answer, _ = first_answer([knows, Declared()], request)
    assert answer == Estimate(footprint_mib=5_000, upper_mib=5_000, source="declared", seconds=answer.seconds)  # type: ignore[union-attr]
