"""Several processes: torchrun and others, and which of the reports counts."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from tests.estimating.trying import Stop, Trying, peak_bytes, stepped, stopped

_RUN = ("-m", "torch.distributed.run")


def test_replicas_have_buckets_of_the_size_of_their_gradients(trying: Trying) -> None:
    replica = trying.python(*_RUN, "--nproc_per_node=1", "ddp.py")
    plain = trying.python(*_RUN, "--nproc_per_node=1", "ddp.py", "--plain")
    assert (replica.report.rank, replica.report.world_size, replica.report.steps) == (0, 1, 3)
    assert "ddp" in replica.report.flags
    assert "ddp" not in plain.report.flags
    assert replica.report.optimizer_bytes == 2 * replica.report.parameters_bytes
    more = peak_bytes(replica) - peak_bytes(plain)
    assert 0.9 < more / replica.report.gradients_bytes < 1.2


def test_two_processes_of_torchrun_and_of_spawn_agree(trying: Trying) -> None:
    one = trying.python(*_RUN, "--nproc_per_node=1", "ddp.py")
    two = trying.python(*_RUN, "--nproc_per_node=2", "ddp.py", gpus=2)
    spawned = trying.python("ddp.py", "--spawn", "2", gpus=2)
    for trial in (two, spawned):
        assert (trial.report.rank, trial.report.world_size, trial.report.steps) == (0, 2, 3)
        assert peak_bytes(trial) == pytest.approx(peak_bytes(one), rel=0.01)


def test_what_replicas_may_do_besides(trying: Trying) -> None:
    words = ("--accumulate", "--unused", "--hook", "--sync")
    report = trying.python("-m", "torch.distributed.launch", "--nproc_per_node=2", "ddp.py", *words, gpus=2).report
    assert (report.world_size, report.steps) == (2, 3)
    assert report.optimizer_bytes == 2 * report.parameters_bytes


def test_accelerate_launch(trying: Trying) -> None:
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    command = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "hf_accelerate.py")
    report = trying.python(*command, gpus=2).report
    assert (report.world_size, report.steps) == (2, 3)
    assert "ddp" in report.flags


@pytest.mark.parametrize("api", ["1", "2"])
def test_sharded_models_reach_their_steps(trying: Trying, api: str) -> None:
    report = trying.python(*_RUN, "--nproc_per_node=1", "fsdp.py", api).report
    parameters_bytes = 4 * (512 * 2048 + 2048 + 2048 * 1024 + 1024)
    assert (report.world_size, report.steps) == (1, 3)
    assert report.parameters_bytes == pytest.approx(parameters_bytes, rel=0.01)
    assert report.gradients_bytes == pytest.approx(parameters_bytes, rel=0.01)
    assert report.optimizer_bytes == pytest.approx(2 * parameters_bytes, rel=0.01)
    peak = peak_bytes(trying.python(*_RUN, "--nproc_per_node=1", "fsdp.py", api))
    assert 4 * parameters_bytes < peak < 8 * parameters_bytes


@pytest.mark.parametrize("api", ["1", "2"])
def test_each_of_two_processes_holds_half_of_a_sharded_model(trying: Trying, api: str) -> None:
    one = trying.python(*_RUN, "--nproc_per_node=1", "fsdp.py", api).report
    two = trying.python(*_RUN, "--nproc_per_node=2", "fsdp.py", api, gpus=2).report
    assert two.world_size == 2
    for field in ("parameters_bytes", "gradients_bytes", "optimizer_bytes"):
        assert getattr(two, field) == pytest.approx(getattr(one, field) / 2, rel=0.01), field


def test_the_error_of_a_process_is_reported_and_not_that_of_its_starter(trying: Trying) -> None:
    command = ("-m", "torch.distributed.run", "--nproc_per_node=1", "ddp.py", "--nonsense")
    found = stopped(trying.run(sys.executable, *command))
    assert (found.stop, found.cause) == ("error", "crashed")
    assert "code 2" in found.reason


def test_the_error_of_a_spawned_process_is_reported(trying: Trying) -> None:
    found = stopped(
        trying.script("""
import torch
def train(rank):
    torch.zeros(3).cuda()
    raise ValueError("no such data")
if __name__ == "__main__":
    torch.multiprocessing.spawn(train, nprocs=1)
""")
    )
    assert found == ("error", "crashed", "ValueError: no such data")


def test_data_parallel_with_two_gpus_is_refused(trying: Trying) -> None:
    found = stopped(trying.run(sys.executable, "encoder.py", "--parallel", gpus=2))
    assert found.stop == "unsupported"
    assert "DataParallel" in found.reason


def test_a_model_on_two_gpus_has_a_warning(trying: Trying) -> None:
    folder = trying.folder()
    (folder / "train.py").write_text("""
import torch
first, second = torch.nn.Linear(64, 64).to("cuda:0"), torch.nn.Linear(64, 64).to("cuda:1")
optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
for _ in range(5):
    second(first(torch.randn(8, 64).to("cuda:0")).to("cuda:1")).sum().backward()
    optimizer.step()
""")
    report = stepped(trying.run_in(folder, sys.executable, "train.py", gpus=2)).report
    assert any("several GPUs" in warning for warning in report.warnings)


_SPAWN = """
import torch
def train(rank):
    model = torch.nn.Linear(64, 64).to("cuda:0")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        model(torch.randn(8, 64).cuda()).sum().backward()
        optimizer.step()
if __name__ == "__main__":
    torch.multiprocessing.spawn(train, nprocs=2)
"""


def _is_refused(found: Stop, number: str) -> bool:
    return found[:2] == ("unsupported", "several") and number in found.reason


def test_two_spawned_processes_on_one_gpu_are_refused(trying: Trying) -> None:
    assert _is_refused(stopped(trying.script(_SPAWN)), "2 processes")


def test_two_commands_at_once_are_refused_and_one_after_the_other_are_not(trying: Trying) -> None:
    at_once = trying.run("sh", "-c", "python gan.py 1 & python gan.py 1; wait")
    assert _is_refused(stopped(at_once), "2 processes")
    trying.stepped("sh", "-c", "python inference.py; python gan.py 1")


@pytest.mark.parametrize("command", [(*_RUN, "--nproc_per_node=2", "ddp.py"), ("ddp.py", "--spawn", "2")])
def test_more_processes_than_gpus_are_refused(trying: Trying, command: tuple[str, ...]) -> None:
    assert _is_refused(stopped(trying.run(sys.executable, *command)), "-G 2")


@pytest.mark.parametrize(
    "use", ["torch.cuda.set_device(1)", "torch.optim.SGD(torch.nn.Linear(8, 8).to('cuda:1').parameters(), lr=0.1)"]
)
def test_a_gpu_that_was_not_requested_is_refused(trying: Trying, use: str) -> None:
    assert _is_refused(stopped(trying.script(f"import torch\n{use}")), "-G 2")
