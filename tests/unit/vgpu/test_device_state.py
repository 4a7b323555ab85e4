"""The arithmetic of virtual GPUs: exact, however often the state is read. Without processes and clock."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carma.core.model.values import Demand
from carma.core.scheduling.sharing_model import progress_rates
from carma.vgpu.device import OutOfDeviceMemory, allocate
from carma.vgpu.device_state import VirtualGpu, VirtualProcess, VirtualWorld, advance, power_w, progress, until_change_s

A, B, C = Demand(0.6, 0.3, 0.3), Demand(0.5, 0.2, 0.2), Demand(0.9, 0.4, 0.5)


def make_world(gpus: int = 2) -> VirtualWorld:
    cards = [VirtualGpu(id=f"VGPU-{index}", index=index, name="Virtual GPU", memory_mib=40960) for index in range(gpus)]
    return VirtualWorld(boot="", origin_s=0.0, epoch_s=0.0, gpus=cards)


def add(
    world: VirtualWorld, gpus: list[int], demand: Demand, wanted_s: float | None, memory_mib: int = 0
) -> VirtualProcess:
    process = VirtualProcess(
        pid=1000 + len(world.processes),
        start_ticks=1,
        gpus=gpus,
        memory_mib=memory_mib,
        demand=demand,
        wanted_s=wanted_s,
    )
    world.processes.append(process)
    return process


def test_a_task_alone_takes_its_own_time() -> None:
    world = make_world()
    task = add(world, [0], A, 30.0)
    advance(world, 29.5)
    assert task.progress_s == 29.5
    assert not task.done
    advance(world, 30.0)
    assert task.done


def test_a_gpu_that_a_task_leaves_idle_shows_no_activity_and_slows_no_task() -> None:
    world = make_world()
    two, beside = add(world, [0, 1], A, 100.0), add(world, [1], B, 100.0)
    two.working = 1
    advance(world, 10.0)
    assert (two.progress_s, beside.progress_s) == (10.0, 10.0)
    assert world.gpus[0].sm_active_s == pytest.approx(10.0 * A.sm_active)
    assert world.gpus[1].sm_active_s == pytest.approx(10.0 * B.sm_active)


def test_a_paused_task_makes_no_progress_and_slows_no_task_down() -> None:
    world = make_world()
    first, second = add(world, [0], A, 100.0), add(world, [0], C, 100.0, memory_mib=500)
    second.paused = True
    advance(world, 10.0)
    assert (first.progress_s, second.progress_s) == (10.0, 0.0)
    assert world.gpus[0].sm_active_s == pytest.approx(10.0 * A.sm_active)
    assert world.used_mib(0) == 500


def test_a_neighbour_that_joins_slows_the_task_from_that_moment_on() -> None:
    world = make_world()
    first = add(world, [0], A, 100.0)
    advance(world, 10.0)
    second = add(world, [0], B, 100.0)
    advance(world, 30.0)
    rate_first, rate_second = progress_rates([A, B])
    assert first.progress_s == pytest.approx(10.0 + 20.0 * rate_first, abs=1e-9)
    assert second.progress_s == pytest.approx(20.0 * rate_second, abs=1e-9)


def test_a_neighbour_stops_slowing_the_task_at_its_end_not_at_the_next_read() -> None:
    world = make_world()
    long, short = add(world, [0], A, 1000.0), add(world, [0], B, 5.0)
    rate_long, rate_short = progress_rates([A, B])
    advance(world, 500.0)  # one look, long after the short one's end
    shared_s = 5.0 / rate_short
    assert short.progress_s == 5.0
    assert long.progress_s == pytest.approx(shared_s * rate_long + (500.0 - shared_s), abs=1e-9)


def test_tasks_on_different_gpus_do_not_disturb_one_another() -> None:
    world = make_world()
    add(world, [0], A, None)
    add(world, [1], C, None)
    assert [rate for _, rate in progress(world)] == [1.0, 1.0]


def test_a_task_on_several_gpus_has_the_rate_of_the_slowest() -> None:
    world = make_world()
    wide = add(world, [0, 1], A, 100.0)
    add(world, [1], C, None)
    advance(world, 10.0)
    assert wide.progress_s == pytest.approx(10.0 * progress_rates([A, C])[0], abs=1e-9)


@pytest.mark.parametrize("heavy", [0, 1])
def test_the_slowest_gpu_counts_in_any_order(heavy: int) -> None:
    world = make_world()
    wide = add(world, [0, 1], A, 100.0)
    add(world, [heavy], C, None)
    add(world, [1 - heavy], B, None)
    advance(world, 10.0)
    slowest = min(progress_rates([A, C])[0], progress_rates([A, B])[0])
    assert wide.progress_s == pytest.approx(10.0 * slowest, abs=1e-9)


def test_a_lost_gpu_does_no_work_and_counts_no_energy() -> None:
    world = make_world()
    task = add(world, [0, 1], A, 100.0)
    advance(world, 10.0)
    energy_j = world.gpus[1].energy_j
    world.gpus[1].faults = ["lost"]
    advance(world, 20.0)
    assert task.progress_s == 10.0
    assert world.gpus[1].energy_j == energy_j


def test_what_a_process_does_not_say_is_not_written() -> None:
    """A task of an older version also reads the file, and refuses unknown fields."""
    world = make_world()
    add(world, [0], A, 10.0)
    (written,) = msgspec.json.decode(msgspec.json.encode(world))["processes"]
    assert written["demand"].keys() == {"sm_active", "sm_occupancy", "dram_active"}
    assert msgspec.json.decode(msgspec.json.encode(world), type=VirtualWorld).processes == world.processes


def test_time_never_goes_back() -> None:
    world = make_world()
    task = add(world, [0], A, 100.0)
    advance(world, 10.0)
    advance(world, 4.0)
    assert (world.at_s, task.progress_s) == (10.0, 10.0)


def test_energy_is_power_over_time_through_every_change() -> None:
    world = make_world(1)
    gpu = world.gpus[0]
    add(world, [0], A, 8.0)
    advance(world, 20.0)
    assert power_w(gpu, Demand(0.0, 0.0, 0.0)) == gpu.idle_w
    assert power_w(gpu, Demand(1.0, 1.0, 1.0)) == pytest.approx(gpu.peak_w)
    assert gpu.energy_j == pytest.approx(8.0 * power_w(gpu, A) + 12.0 * gpu.idle_w)


@pytest.mark.parametrize(
    ("sm", "dram", "watts"),
    [
        (0.423, 0.262, 218),
        (0.638, 0.382, 263),
        (0.43, 0.252, 213),
        (0.615, 0.366, 262),
        (0.605, 0.265, 221),
        (0.769, 0.338, 253),
    ],
)
def test_power_is_near_the_published_means_of_an_a100(sm: float, dram: float, watts: float) -> None:
    assert power_w(make_world().gpus[0], Demand(sm, 0.2, dram)) == pytest.approx(watts, abs=15)


@given(
    st.lists(st.floats(min_value=0.01, max_value=40.0), min_size=1, max_size=12),
    st.lists(st.floats(min_value=0.5, max_value=60.0), min_size=1, max_size=4),
)
def test_looking_often_or_once_gives_the_same(spans: list[float], lengths: list[float]) -> None:
    often, once = make_world(), make_world()
    for place, length in enumerate(lengths):
        for world in (often, once):
            add(world, [[0], [1], [0, 1], [0]][place], [A, B, C, B][place], length)
    for span in spans:
        advance(often, often.at_s + span)
    advance(once, often.at_s)
    for one, other in zip(often.processes, once.processes, strict=True):
        assert one.progress_s == pytest.approx(other.progress_s, abs=1e-6)
    for gpu, same in zip(often.gpus, once.gpus, strict=True):
        assert gpu.energy_j == pytest.approx(same.energy_j, rel=1e-9)
        assert gpu.sm_active_s == pytest.approx(same.sm_active_s, abs=1e-6)


@given(st.lists(st.tuples(st.sampled_from([A, B, C]), st.floats(0.1, 1e5)), min_size=1, max_size=6))
def test_going_from_change_to_change_reaches_every_end(tasks: list[tuple[Demand, float]]) -> None:
    world = make_world(1)
    for demand, length in tasks:
        add(world, [0], demand, length)
    for _ in range(2 * len(tasks)):
        step_s = until_change_s(world, world.processes[0])
        if step_s is not None:
            advance(world, world.at_s + step_s * (1 + 1e-12))
    assert all(process.done for process in world.processes)
    assert until_change_s(world, world.processes[0]) is None


def test_memory_beyond_the_device_is_refused_in_pytorchs_words() -> None:
    world = make_world()
    add(world, [0], A, None, memory_mib=30720)
    newcomer = add(world, [0], B, None, memory_mib=8192)
    with pytest.raises(OutOfDeviceMemory) as raised:
        allocate(world, newcomer, 2560)
    assert newcomer.memory_mib == 8192
    assert (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity of 40.00 "
        "GiB of which 2.00 GiB is free. Process 1000 has 30.00 GiB memory in use. Including non-PyTorch memory, this "
        "process has 8.00 GiB memory in use. Of the allocated memory" in raised.value.as_pytorch(1)
    )
    allocate(world, newcomer, 2048)
    assert world.used_mib(0) == 40960


def test_a_share_is_a_limit_of_its_own() -> None:
    world = make_world()
    process = add(world, [0], A, None, memory_mib=900)
    with pytest.raises(OutOfDeviceMemory) as raised:
        allocate(world, process, 101, limit_mib=1000)
    assert "1000.00 MiB allowed; " in raised.value.as_pytorch(0)
    allocate(world, process, 100, limit_mib=1000)
    assert process.memory_mib == 1000
