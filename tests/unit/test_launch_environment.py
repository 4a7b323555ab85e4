"""What a task finds in its environment, and where its output goes."""

from __future__ import annotations

from carma.core.model import ArrayPlace, TaskId
from carma.launch.environment import task_environment
from carma.launch.logs import expand, paths_for
from tests.launch_orders import order_of, spec_of


def test_gpus_are_given_by_uuid_in_pci_order() -> None:
    order = order_of(spec_of("true"), 7, 2, gpus=("GPU-b", "GPU-a"))
    environment = task_environment(order, {})
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-a"
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert environment["CARMA_GPUS"] == "GPU-b,GPU-a"
    assert environment["CARMA_GPU_MEMORY_MIB"] == "4096"
    assert (environment["CARMA_TASK_ID"], environment["CARMA_ATTEMPT"]) == ("7", "2")


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


def test_a_task_of_an_array_knows_its_place() -> None:
    environment = task_environment(order_of(spec_of("true", array=ArrayPlace(TaskId(40), 3)), 43), {})
    assert (environment["CARMA_ARRAY_ID"], environment["CARMA_ARRAY_INDEX"]) == ("40", "3")


def test_log_names_are_expanded_and_stay_in_their_directory() -> None:
    spec = spec_of("true", directory="/home/me", name="../../etc/x", array=ArrayPlace(TaskId(40), 3))
    order = order_of(spec, 43, 2)
    assert expand("out/%j_%a.%t-%x%%j", order) == "/home/me/out/43_3.2-.._.._etc_x%j"
    assert expand("/var/log/%j", order) == "/var/log/43"


def test_output_alone_takes_standard_error_too() -> None:
    assert paths_for(order_of(spec_of("true")), "O", "E") == ("O", "E")
    assert paths_for(order_of(spec_of("true", output="/o")), "O", "E") == ("/o", "/o")
    assert paths_for(order_of(spec_of("true", error="/e")), "O", "E") == ("O", "/e")
    assert paths_for(order_of(spec_of("true", output="/o", error="/e")), "O", "E") == ("/o", "/e")
