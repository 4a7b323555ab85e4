"""Virtual GPUs with real processes: a task on its device, and the state after its end."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from carma.errors import BadSettings, StoreError
from carma.vgpu import virtual_server as world
from carma.vgpu.device import Device
from carma.vgpu.device_state import VirtualProcess, VirtualWorld
from carma.vgpu.sampler import VirtualSampler
from tests import virtual_faults as faults

LIMIT_S = 180.0
Start = Callable[..., "subprocess.Popen[str]"]
FOREVER = "--seconds 1000000 --ramp-s 0"


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return world.create(str(tmp_path / "vgpu"), gpus=2, memory_mib=40960, speed=100.0)


@pytest.fixture
def start(device: Device) -> Iterator[Start]:
    """start("--memory-mib 10 ...", gpus=..., NAME=value) runs a task; all are killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def run(line: str, *, gpus: str = world.gpu_uuid(0), **variables: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "CARMA_VGPU_DIR": device.directory, "CUDA_VISIBLE_DEVICES": gpus, **variables}
        process = subprocess.Popen(
            [sys.executable, "-m", "carma.vgpu.virtual_task", *line.split()],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=LIMIT_S)
    return process.returncode, out, err


def until(device: Device, holds: Callable[[VirtualWorld], bool]) -> VirtualWorld:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        seen = device.read()
        if holds(seen):
            return seen
        time.sleep(0.01)
    raise AssertionError(f"never came true; last seen: {device.read()}")


def holding(index: int, memory_mib: int) -> Callable[[VirtualWorld], bool]:
    return lambda seen: seen.used_mib(index) == memory_mib


def test_a_task_runs_to_its_end_and_leaves_nothing(device: Device, start: Start) -> None:
    code, out, err = end(start("--memory-mib 3934 --sm 0.45 --dram 0.2 --seconds 20"))
    assert (code, err) == (0, "")
    assert out.startswith(f"started on {world.gpu_uuid(0)}")
    assert "done: 20 s of work" in out
    after = device.read()
    assert after.processes == []
    assert after.at_s >= 20.0
    assert after.gpus[0].sm_active_s == pytest.approx(0.45 * 20, rel=1e-6)  # it worked for exactly its length
    assert after.gpus[1].sm_active_s == 0.0


def test_sharing_tasks_do_their_whole_work_whenever_they_wake(device: Device, start: Start) -> None:
    tasks = [start(f"--memory-mib 1000 --sm 0.5 --dram 0.3 --seconds {length}") for length in (30, 60, 45)]
    assert [end(task)[0] for task in tasks] == [0, 0, 0]
    gpu = device.read().gpus[0]
    assert gpu.dram_active_s == pytest.approx(0.3 * (30 + 60 + 45), rel=1e-6)


def test_memory_is_taken_over_the_ramp(device: Device, start: Start) -> None:
    start("--memory-mib 5000 --seconds 1000000 --ramp-s 20")
    assert until(device, lambda seen: seen.used_mib(0) > 0).used_mib(0) % 1000 == 0
    until(device, holding(0, 5000))


def test_beyond_the_device_a_task_fails_as_pytorch_does(device: Device, start: Start) -> None:
    start(f"--memory-mib 30720 {FOREVER}")
    until(device, holding(0, 30720))
    code, _, err = end(start(f"--memory-mib 12800 {FOREVER}"))
    assert code == 1
    assert err.startswith("Traceback (most recent call last):")
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity" in err
    assert device.read().used_mib(0) == 30720  # the neighbour keeps its own


def test_a_task_fails_at_its_share(start: Start) -> None:
    code, _, err = end(start(f"--memory-mib 5000 {FOREVER}", CARMA_VGPU_LIMIT_MIB="4000"))
    assert code == 1
    assert "CUDA out of memory" in err
    assert "3.91 GiB allowed" in err


def test_kill_9_frees_the_memory_and_the_neighbours(device: Device, start: Start) -> None:
    victim = start(f"--memory-mib 1000 {FOREVER}")
    until(device, holding(0, 1000))
    start(f"--memory-mib 2000 {FOREVER}")
    until(device, holding(0, 3000))
    victim.kill()  # not waited for: a zombie holds no GPU memory either
    until(device, holding(0, 2000))  # looking changes nothing: it was the neighbour that dropped it


def test_a_process_with_a_recycled_pid_does_not_count_as_the_old_one(device: Device) -> None:
    with device.changing() as seen:
        seen.processes.append(VirtualProcess(pid=os.getpid(), start_ticks=1, gpus=[0], memory_mib=1))
    with device.changing() as seen:
        assert seen.processes == []


def test_a_task_on_two_gpus_takes_memory_on_both(device: Device, start: Start) -> None:
    both = f"{world.gpu_uuid(1)},{world.gpu_uuid(0)}"
    start(f"--memory-mib 1500 {FOREVER}", gpus=both)
    seen = until(device, lambda seen: seen.used_mib(0) == seen.used_mib(1) == 1500)
    assert len(seen.processes) == 1


def test_the_exit_code_is_the_one_asked_for(start: Start) -> None:
    assert end(start("--memory-mib 10 --seconds 1 --exit-code 7"))[0] == 7


def test_a_task_that_ignores_sigterm_goes_on(device: Device, start: Start) -> None:
    stubborn = start(f"--memory-mib 100 {FOREVER} --ignore-sigterm")
    until(device, holding(0, 100))
    stubborn.terminate()
    faults.inject(device, "lost", 0)
    assert end(stubborn)[0] == 1  # what ended it came after the signal


def test_sigterm_ends_an_ordinary_task(device: Device, start: Start) -> None:
    task = start(f"--memory-mib 100 {FOREVER}")
    until(device, holding(0, 100))
    task.terminate()
    assert end(task)[0] == -signal.SIGTERM


def test_a_hanging_task_holds_memory_and_does_nothing(device: Device, start: Start) -> None:
    task = start("--memory-mib 100 --seconds 5 --ramp-s 1 --hang")
    seen = until(device, lambda seen: any(process.wanted_s is None for process in seen.processes))
    assert seen.used_mib(0) == 100
    sampler = VirtualSampler(device)
    assert sampler.sample(1.0)[0].activity.sm_active == 0.0
    assert task.poll() is None


@pytest.mark.parametrize(
    ("variables", "code", "words"),
    [
        ({"CARMA_VGPU_DIR": ""}, 2, "CARMA_VGPU_DIR is not set"),
        ({"CARMA_VGPU_DIR": "/dev/null/vgpu"}, 1, "/dev/null/vgpu cannot be used"),
        ({"CUDA_VISIBLE_DEVICES": ""}, 2, "CUDA_VISIBLE_DEVICES is not set or is empty"),
        ({"CUDA_VISIBLE_DEVICES": "VGPU-none"}, 4, "names VGPU-none"),
        ({"CARMA_VGPU_LIMIT_MIB": "4G"}, 2, "CARMA_VGPU_LIMIT_MIB=4G"),
    ],
)
def test_a_task_without_a_device_says_what_is_missing(
    start: Start, variables: dict[str, str], code: int, words: str
) -> None:
    gpus = variables.pop("CUDA_VISIBLE_DEVICES", world.gpu_uuid(0))
    found, out, err = end(start("--memory-mib 10 --seconds 1", gpus=gpus, **variables))
    assert (found, out) == (code, "")
    assert words in err
    assert "Traceback" not in err


def test_when_a_gpu_is_lost_its_tasks_die_and_others_go_on(device: Device, start: Start) -> None:
    task, other = start(f"--memory-mib 100 {FOREVER}"), start(f"--memory-mib 200 {FOREVER}", gpus=world.gpu_uuid(1))
    until(device, lambda seen: (seen.used_mib(0), seen.used_mib(1)) == (100, 200))
    assert faults.main(["--dir", device.directory, "lost", "--gpu", "0"]) == 0
    code, _, err = end(task)
    assert code == 1
    assert "RuntimeError: CUDA error" in err
    assert other.poll() is None
    assert end(start("--memory-mib 1 --seconds 1"))[0] == 1  # nor can a new one start there
    assert faults.main(["--dir", device.directory, "clear"]) == 0
    assert end(start("--memory-mib 1 --seconds 1"))[0] == 0


def test_a_reopened_world_has_the_same_gpus_and_the_running_tasks(device: Device, start: Start) -> None:
    task = start(f"--memory-mib 100 {FOREVER}")
    before = until(device, holding(0, 100))
    again = world.ensure(device.directory, 2, 40960, speed=50.0).read()
    assert [gpu.id for gpu in again.gpus] == [gpu.id for gpu in before.gpus]
    assert [process.pid for process in again.processes] == [task.pid]
    assert again.at_s >= before.at_s
    assert again.speed == 50.0
    with pytest.raises(BadSettings, match=rf"of 30000MiB: 2 virtual GPUs of 40GiB .* process {task.pid} ") as refused:
        world.ensure(device.directory, 4, 30_000)
    assert "carma up --virtual-gpus 2 --gpu-memory 40GiB;" in refused.value.hint


def test_an_unused_state_can_change_its_gpus_and_a_damaged_one_is_replaced(device: Device) -> None:
    assert len(world.ensure(device.directory, 3, 1024).read().gpus) == 3
    (Path(device.directory) / "state.json").write_bytes(b'{"version":')
    with pytest.raises(StoreError, match="cannot be used"):
        device.read()
    assert len(world.ensure(device.directory, 4, 1024).read().gpus) == 4


def test_after_a_reboot_time_goes_on_and_no_task_is_there(device: Device) -> None:
    with device.changing() as seen:
        seen.boot, seen.at_s, seen.origin_s = "an earlier boot", 5000.0, time.monotonic() + 1e6
    after = world.reopen(device.directory).read()
    assert after.processes == []
    assert after.at_s >= 5000.0


@pytest.mark.parametrize(("shared", "directory_mode", "file_mode"), [(False, 0o700, 0o600), (True, 0o777, 0o666)])
def test_a_world_is_private_unless_it_is_shared(
    tmp_path: Path, shared: bool, directory_mode: int, file_mode: int
) -> None:
    directory = tmp_path / "vgpu"
    device = world.create(str(directory), 1, 1024, shared=shared)
    with device.changing():
        pass
    assert stat.S_IMODE(directory.stat().st_mode) == directory_mode
    assert {stat.S_IMODE(file.stat().st_mode) for file in directory.iterdir()} == {file_mode}


def test_a_change_that_fails_changes_nothing(device: Device) -> None:
    def spoil() -> None:
        with device.changing() as seen:
            seen.gpus[0].memory_mib = 1
            raise RuntimeError

    with pytest.raises(RuntimeError):
        spoil()
    assert device.read().gpus[0].memory_mib == 40960


def test_impossible_worlds_are_refused(tmp_path: Path) -> None:
    for gpus, memory_mib, speed in ((0, 1024, 1.0), (1, 0, 1.0), (1, 1024, 0.0), (1, 1024, float("nan"))):
        with pytest.raises(BadSettings):
            world.create(str(tmp_path / "none"), gpus, memory_mib, speed)


def test_a_task_that_is_stopped_stands_still_on_its_gpu_too(device: Device, start: Start) -> None:
    process = start(f"--memory-mib 10 {FOREVER}")
    sampler = VirtualSampler(device)

    def is_seen(paused: bool) -> Callable[[VirtualWorld], bool]:
        """A sample notes it in the world."""
        return lambda world: bool(sampler.sample(0.0)) and [one.paused for one in world.processes] == [paused]

    until(device, is_seen(False))
    process.send_signal(signal.SIGSTOP)
    before = until(device, is_seen(True))
    after = until(device, lambda world: world.at_s > before.at_s)
    assert after.processes[0].progress_s == before.processes[0].progress_s
    process.send_signal(signal.SIGCONT)
    until(device, is_seen(False))
