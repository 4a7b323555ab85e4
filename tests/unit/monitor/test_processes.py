"""The attribution of processes to attempts, and processes outside their attempt's placement."""

from __future__ import annotations

import msgspec

from carma.core.model.values import AttemptKey, Booking, GpuId, GpuSample, Placement, ProcessUse, TaskId
from carma.monitor.processes import Stray, attribute, strays

A, B = GpuId("GPU-a"), GpuId("GPU-b")
FIRST, SECOND = AttemptKey(TaskId(1), 1), AttemptKey(TaskId(2), 3)


def seen(gpu: GpuId, *pids: int) -> GpuSample:
    return GpuSample(gpu=gpu, at=1.0, processes=tuple(ProcessUse(pid=pid, memory_mib=pid) for pid in pids))


def given(*gpus: GpuId) -> Placement:
    return Placement(gpus=gpus, booking=Booking(memory_mib=1, source="declared"))


def owners(sample: GpuSample) -> list[AttemptKey | None]:
    return [process.attempt for process in sample.processes or ()]


def test_processes_get_their_attempt_and_foreign_ones_none() -> None:
    samples = attribute((seen(A, 10, 11, 99), seen(B, 20)), {10: FIRST, 11: FIRST, 20: SECOND, 30: SECOND})
    assert [owners(sample) for sample in samples] == [[FIRST, FIRST, None], [SECOND]]
    assert [process.memory_mib for process in samples[0].processes or ()] == [10, 11, 99]


def test_a_sample_without_processes_stays_as_it_is() -> None:
    lost = GpuSample(gpu=A, at=1.0, fault="the GPU does not answer")
    assert attribute((lost, seen(B)), {10: FIRST}) == (lost, seen(B))


def test_a_process_on_a_gpu_that_it_was_not_given_is_a_stray() -> None:
    samples = attribute((seen(A, 10), seen(B, 10, 20)), {10: FIRST, 20: SECOND})
    found = strays(samples, {FIRST: given(A), SECOND: given(A, B)})
    assert found == (Stray(attempt=FIRST, pid=10, gpu=B, given=(A,)),)
    assert str(found[0]) == "process 10 of task 1 runs on GPU-b; it was given GPU-a"


def test_foreign_processes_and_unplaced_attempts_are_no_strays() -> None:
    samples = attribute((seen(A, 10, 99),), {10: FIRST})
    assert strays(samples, {SECOND: given(B)}) == ()


def test_an_attempt_without_any_gpu_that_shows_up_on_one_is_a_stray() -> None:
    samples = attribute((seen(A, 10),), {10: FIRST})
    (stray,) = strays(samples, {FIRST: given()})
    assert str(stray).endswith("it was given no GPU")


def test_our_own_servers_are_neither_attributed_nor_foreign() -> None:
    sample = msgspec.structs.replace(seen(A, 10, 66, 99), memory_used_mib=175)
    (kept,) = attribute((sample,), {10: FIRST}, ours=frozenset({66}))
    assert [(process.pid, process.attempt) for process in kept.processes or ()] == [(10, FIRST), (99, None)]
    assert kept.memory_used_mib == 175  # what the server holds is still used


def test_a_server_alone_on_a_gpu_leaves_an_empty_list_and_not_an_unknown_one() -> None:
    (kept,) = attribute((seen(A, 66),), {}, ours={66})
    assert kept.processes == ()


def test_a_process_of_an_attempt_stays_attributed_even_if_it_is_listed_as_a_server() -> None:
    (kept,) = attribute((seen(A, 10),), {10: FIRST}, ours={10})
    assert owners(kept) == [FIRST]
