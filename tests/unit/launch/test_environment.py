"""The environment of a task, and the files of its output."""

from __future__ import annotations

import json
import os

import pytest
from msgspec.structs import replace

from carma.core.model.values import ArrayPlace, Owner, TaskId
from carma.core.ports import LaunchOrder
from carma.launch.confinement import task_environment
from carma.launch.output_paths import before_placeholders, named_outputs, unknown_placeholder
from carma.testing.builders import gpu
from carma.testing.launcher_contract import order_of
from tests.launch_orders import spec_of


def test_gpus_are_given_by_uuid_in_pci_order() -> None:
    order = order_of(spec_of("true"), 7, 2, gpus=("GPU-b", "GPU-a"))
    environment = task_environment(order, {})
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-a"
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert environment["CUDA_MPS_PIPE_DIRECTORY"] == "/nonexistent/carma-mps", "no MPS server of the whole machine"
    assert environment["CARMA_GPUS"] == "GPU-b,GPU-a"
    assert environment["CARMA_GPU_MEMORY_MIB"] == "4096"
    assert (environment["CARMA_TASK_ID"], environment["CARMA_ATTEMPT"]) == ("7", "2")


@pytest.mark.parametrize(("attempt", "preempted", "seen"), [(1, False, None), (3, False, None), (3, True, "1")])
def test_a_task_knows_how_often_it_was_started_and_whether_it_was_asked_to_save(
    attempt: int, preempted: bool, seen: str | None
) -> None:
    own = {"CARMA_PREEMPTED": "7", "CARMA_RESTART_COUNT": "7"}  # of the task from which it was submitted
    order = replace(order_of(spec_of("true", environment=own), 7, attempt), preempted=preempted)
    environment = task_environment(order, {})
    assert environment["CARMA_RESTART_COUNT"] == str(attempt - 1)
    assert environment.get("CARMA_PREEMPTED") == seen


def test_a_task_without_gpus_sees_none() -> None:
    assert task_environment(order_of(spec_of("true"), gpus=()), {})["CUDA_VISIBLE_DEVICES"] == ""


def test_the_submitters_environment_is_kept_and_cannot_choose_gpus() -> None:
    own = {"PATH": "/bin", "MY": "x", "CUDA_VISIBLE_DEVICES": "0,1,2,3", "CARMA_HOME": "/home/me/carma"}
    environment = task_environment(order_of(spec_of("true", environment=own)), {"EXTRA": "1", "MY": "server"})
    assert environment["PATH"] == "/bin"
    assert environment["CARMA_HOME"] == "/home/me/carma"
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-0a"
    assert environment["EXTRA"] == "1"
    assert environment["MY"] == "server"


def test_what_belongs_to_another_job_does_not_reach_the_task() -> None:
    own = {
        "SLURM_NTASKS": "8",
        "SLURM_JOB_ID": "1",
        "CARMA_ARRAY_INDEX": "3",
        "CARMA_LAUNCH": "outer",
        "SLURMISH": "mine",
    }
    environment = task_environment(order_of(spec_of("true", environment=own)), {})
    assert not {"SLURM_NTASKS", "SLURM_JOB_ID", "CARMA_ARRAY_INDEX", "CARMA_LAUNCH"} & set(environment)
    assert environment["SLURMISH"] == "mine"


def test_experiment_trackers_find_tags_of_the_task_unless_the_submitter_set_some() -> None:
    order = order_of(spec_of("true"), 7, 2, gpus=("GPU-b", "GPU-a"))
    environment = task_environment(order, {})
    assert json.loads(environment["MLFLOW_RUN_CONTEXT"]) == {
        "carma.task_id": "7",
        "carma.attempt": "2",
        "carma.gpus": "GPU-b,GPU-a",
        "carma.gpu_memory_mib": "4096",
    }
    tags = ["carma-task-7", "carma-attempt-2", "carma-gpu-GPU-b", "carma-gpu-GPU-a", "carma-booked-4096-MiB"]
    assert environment["WANDB_TAGS"].split(",") == tags
    long = task_environment(order_of(spec_of("true"), gpus=("G" * 80,)), {})["WANDB_TAGS"]
    assert all(0 < len(tag) <= 64 for tag in long.split(",")), "W&B refuses longer tags"
    own = {"MLFLOW_RUN_CONTEXT": "{}", "WANDB_TAGS": "mine"}
    assert own.items() <= task_environment(order_of(spec_of("true", environment=own)), {}).items()
    inside = task_environment(order_of(spec_of("true", environment=environment), 8), {})
    assert inside["WANDB_TAGS"].startswith("carma-task-8,"), "submitted from inside task 7"
    assert json.loads(inside["MLFLOW_RUN_CONTEXT"])["carma.task_id"] == "8"
    off = task_environment(order_of(spec_of("true", environment=environment), 8), {}, tracker_tags=False)
    assert not {"MLFLOW_RUN_CONTEXT", "WANDB_TAGS"} & off.keys()


def test_a_task_of_an_array_knows_its_place() -> None:
    environment = task_environment(order_of(spec_of("true", array=ArrayPlace(TaskId(40), 3)), 43), {})
    assert (environment["CARMA_ARRAY_ID"], environment["CARMA_ARRAY_INDEX"]) == ("40", "3")


def test_a_script_for_sbatch_finds_its_place_in_an_array_and_nothing_else_of_slurms() -> None:
    own = {"SLURM_NTASKS": "8", "SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_JOB_ID": "1"}
    inside = task_environment(order_of(spec_of("true", environment=own, array=ArrayPlace(TaskId(40), 3)), 43), {})
    assert {name: value for name, value in inside.items() if name.startswith("SLURM")} == {
        "SLURM_ARRAY_JOB_ID": "40",
        "SLURM_ARRAY_TASK_ID": "3",
    }
    outside = task_environment(order_of(spec_of("true", environment=own)), {})
    assert not [name for name in outside if name.startswith("SLURM")]


def test_a_script_with_sbatch_lines_gets_the_variables_of_a_job_but_none_of_a_process_group() -> None:
    own = {"SLURM_NTASKS": "8", "SLURM_PROCID": "3", "SLURM_JOB_ID": "1", "SLURM_CPUS_PER_TASK": "64"}
    slurm = {"SLURM_CPUS_PER_TASK": "4", "SLURM_JOB_ID": "2", "CUDA_VISIBLE_DEVICES": "0,1", "CARMA_PREEMPTED": "1"}
    spec = spec_of("/bin/sh", "/d/train.sh", environment=own, directory="/d", slurm=slurm)
    inside = task_environment(replace(order_of(spec, 43, 2), gpus=(gpu(3),)), {})
    assert inside["CUDA_VISIBLE_DEVICES"] == "GPU-0a"
    assert "CARMA_PREEMPTED" not in inside
    assert {name: value for name, value in inside.items() if name.startswith("SLURM")} == {
        **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID"), "43"),
        **dict.fromkeys(
            ("SLURMD_NODENAME", "SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_SUBMIT_HOST"), os.uname().nodename
        ),
        **dict.fromkeys(("SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_RESTART_COUNT"), "1"),
        "SLURM_JOB_NAME": "train.sh",
        "SLURM_SUBMIT_DIR": "/d",
        "SLURM_GPUS_ON_NODE": "1",
        "SLURM_JOB_GPUS": "3",
        "SLURM_CPUS_PER_TASK": "4",
    }


def expand(template: str, order: LaunchOrder) -> str | None:
    return named_outputs(order.key, order.owner, replace(order.spec, output=template))[0]


def outputs(**named: str) -> tuple[str | None, str | None]:
    order = order_of(spec_of("true", **named))
    return named_outputs(order.key, order.owner, order.spec)


def test_log_names_are_expanded_and_stay_in_their_directory() -> None:
    spec = spec_of("true", directory="/home/me", name="../../etc/x", array=ArrayPlace(TaskId(40), 3))
    order = order_of(spec, 43, 2)
    assert expand("out/%j_%a.%t-%x%%j", order) == "/home/me/out/43_3.2-.._.._etc_x%j"
    assert expand("/var/log/%j", order) == "/var/log/43"
    assert expand("slurm-%A_%a.out", order) == "/home/me/slurm-40_3.out"


def test_outside_an_array_its_places_are_the_tasks_own() -> None:
    order = order_of(spec_of("/usr/bin/python3", "src/train.py", directory="/d"), 43, owner=Owner(1, 1, "ada"))
    assert expand("%A_%a-%u-%x", order) == "/d/43_0-ada-train.py"


@pytest.mark.parametrize(
    ("template", "unknown"),
    [("%j-%A_%a.%t-%x-%u%%", None), ("log", None), ("%N.out", "%N"), ("%%N", None), ("%%%N", "%N"), ("50%", "%")],
)
def test_a_place_that_stands_for_nothing_is_noticed(template: str, unknown: str | None) -> None:
    assert unknown_placeholder(template) == unknown


@pytest.mark.parametrize(
    ("template", "fixed"), [("a/b", "a/b"), ("a/%j/b", "a/"), ("a%%j/%%%j", "a%j/%"), ("%x", ""), ("100%%", "100%")]
)
def test_what_every_task_has_in_common_of_its_path(template: str, fixed: str) -> None:
    assert before_placeholders(template) == fixed


def test_output_alone_takes_standard_error_too() -> None:
    assert outputs() == (None, None)
    assert outputs(output="/o") == ("/o", "/o")
    assert outputs(error="/e") == (None, "/e")
    assert outputs(output="/o", error="/e") == ("/o", "/e")
