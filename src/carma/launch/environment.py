"""The environment of a task: the submitter's, with the GPUs of its placement and its task id."""

from __future__ import annotations

from collections.abc import Mapping

from carma.core.ports import LaunchOrder
from carma.launch.mps_control import PIPE_VARIABLE

TOKEN_VARIABLE = "CARMA_LAUNCH"
# CUDA joins whatever MPS answers in the default directory. A task that shares its GPUs as a plain process must not run
# under an MPS server of the whole machine, which CARMA neither watches nor limits: in this directory nothing answers.
NO_MPS_DIRECTORY = "/nonexistent/carma-mps"

# A submission from inside another task or a Slurm job has its variables. Frameworks use them (a library that finds
# SLURM_NTASKS starts a process group of that size), so they are removed. The array variables of Slurm are set
# anew: scripts written for sbatch read them, and no framework uses them. CUDA_MPS_ names the submitter's own MPS server
# and its limits: the server of a task is chosen at its launch.
_REMOVED = (
    *("SLURM_", "SLURMD_", "SRUN_", "CUDA_MPS_", "CARMA_TASK_ID", "CARMA_ATTEMPT", "CARMA_RESTART_COUNT"),
    *("CARMA_PREEMPTED", "CARMA_ARRAY_ID", "CARMA_ARRAY_INDEX", TOKEN_VARIABLE),
)


def task_environment(order: LaunchOrder, extra: Mapping[str, str]) -> dict[str, str]:
    """`extra`, of the server, overrides the submitter's variables; those of GPUs and task override both."""
    inherited = {name: value for name, value in order.spec.environment.items() if not name.startswith(_REMOVED)}
    return {**inherited, **extra, **gpu_variables(order), **task_variables(order)}


def gpu_variables(order: LaunchOrder) -> dict[str, str]:
    """GPUs by UUID: an index means another card where another CUDA_VISIBLE_DEVICES is in force.

    With PCI order the indices that a program prints agree with nvidia-smi. The list is set also if it is empty: without
    the variable CUDA would use every GPU of the machine.
    """
    ids = ",".join(order.placement.gpus)
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        PIPE_VARIABLE: NO_MPS_DIRECTORY,  # under MPS the confiner overrides it
        "CUDA_VISIBLE_DEVICES": ids,
        "CARMA_GPUS": ids,
        "CARMA_GPU_MEMORY_MIB": str(order.placement.booking.memory_mib),
    }


def task_variables(order: LaunchOrder) -> dict[str, str]:
    own = {"CARMA_TASK_ID": str(order.key.task), "CARMA_ATTEMPT": str(order.key.attempt)}
    own["CARMA_RESTART_COUNT"] = str(order.key.attempt - 1)
    if order.preempted:
        own["CARMA_PREEMPTED"] = "1"
    if order.spec.array is not None:
        array, index = str(order.spec.array.array), str(order.spec.array.index)
        own |= {"CARMA_ARRAY_ID": array, "CARMA_ARRAY_INDEX": index}
        own |= {"SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": index}
    return own
