"""How an attempt shares cards and MIG instances, and which limits hold it. Decided for each order at its launch.

The limits, strictest first: the memory limit of MPS, the driver's limit on the attempt's cgroup, the limit of its
framework, and the watchdog. A guard is listed only where it holds. The note says why an expected one is missing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from msgspec.structs import replace

from carma.core.model.settings import Sharing
from carma.core.model.values import Confinement, Guard, Mechanism
from carma.core.ports import Arranged, LaunchOrder
from carma.errors import Refused
from carma.launch.attempt_cgroups import CgroupLimits
from carma.launch.memory_caps import framework_caps, without_hoarding
from carma.launch.mps import MpsServers
from carma.launch.mps_control import PIPE_VARIABLE, MpsFailed
from carma.launch.output_paths import program_name
from carma.launch.process_tree import TOKEN_VARIABLE

MEMORY_VARIABLE = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
THREADS_VARIABLE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
# CUDA joins whatever MPS answers in the default directory. A task that shares its GPUs as a plain process must not run
# under an MPS server of the whole machine, which CARMA neither watches nor limits: in this directory nothing answers.
NO_MPS_DIRECTORY = "/nonexistent/carma-mps"

# A submission from inside another task or a Slurm job has its variables. Frameworks use them (a library that finds
# SLURM_NTASKS starts a process group of that size), so they are removed. The array variables of Slurm get new values:
# scripts written for sbatch read them, and no framework uses them. A script with #SBATCH lines gets more of them
# (`slurm_variables`), but never SLURM_NTASKS and SLURM_PROCID. CUDA_MPS_ names the submitter's own MPS server and its
# limits: the server of a task is chosen at its launch.
_REMOVED = (
    *("SLURM_", "SLURMD_", "SRUN_", "CUDA_MPS_", "CARMA_TASK_ID", "CARMA_ATTEMPT", "CARMA_RESTART_COUNT"),
    *("CARMA_PREEMPTED", "CARMA_ARRAY_ID", "CARMA_ARRAY_INDEX", TOKEN_VARIABLE),
)


def _arranged(mechanism: Mechanism, note: str = "") -> Arranged:
    return Arranged(confinement=Confinement(mechanism=mechanism, note=note))


class GpuConfiner:
    """core.ports.Confiner for cards and MIG instances."""

    def __init__(self, sharing: Sharing, servers: MpsServers | None, limits: CgroupLimits | None = None) -> None:
        self._sharing = sharing
        self._servers = servers
        self._limits = limits

    def arrange(self, order: LaunchOrder) -> Arranged:
        """Starts an MPS server where one is needed. Raises Refused when the task or the settings demand MPS, or MIG,
        and it is not available."""
        if not order.placement.gpus:
            return _arranged("timeslice")
        shared, booking = self._share(order), order.placement.booking
        environment, guards, notes = dict(shared.environment), list[Guard](), [shared.confinement.note]
        if shared.mps_server is None and order.spec.threads_percent is not None:
            notes.append("its share of the SMs is not limited: only MPS limits it")
        if not booking.alone:
            environment |= without_hoarding(order.spec.environment)
            if booking.cap_mib is not None:
                guards, note = self._limit(order, shared.mps_server is not None, booking.cap_mib, environment)
                notes.append(note)
        confinement = replace(
            shared.confinement,
            guards=(*guards, *self._sharing.watchdog_guards(booking)),
            note="; ".join(note for note in notes if note),
        )
        return replace(shared, confinement=confinement, environment=environment)

    def _share(self, order: LaunchOrder) -> Arranged:
        wanted = order.spec.mechanism or self._sharing.mechanism
        if any(gpu.kind == "mig" for gpu in order.gpus):
            return _arranged("mig", "MPS is not used on MIG instances" if wanted == "mps" else "")
        if wanted == "mig":
            raise Refused(
                "tasks of this server share MIG instances only (sharing.mechanism = mig), and its GPU is a whole card",
                "Ask the administrator for MIG instances, or for another sharing.mechanism.",
            )
        if wanted == "timeslice":
            return _arranged("timeslice")
        if wanted == "auto" and order.placement.booking.alone:
            return _arranged("timeslice", "it has its GPUs alone, so MPS would have no effect")
        try:
            return self._under_mps(order)
        except MpsFailed as error:
            if wanted == "auto":
                return _arranged("timeslice", f"MPS cannot be used: {error}")
            raise _refusal(order, str(error)) from error

    def _under_mps(self, order: LaunchOrder) -> Arranged:
        if self._servers is None:
            raise MpsFailed("this server starts no MPS servers")
        serving = self._servers.serve(order.owner)
        environment = serving.control.client_variables()
        if order.spec.threads_percent is not None:
            environment[THREADS_VARIABLE] = str(order.spec.threads_percent)
        return replace(_arranged("mps"), mps_server=serving.name, environment=environment)

    def _limit(
        self, order: LaunchOrder, under_mps: bool, cap_mib: int, environment: dict[str, str]
    ) -> tuple[list[Guard], str]:
        """Adds the limits' variables to `environment`. Returns the guards, and a note about missing ones."""
        guards: list[Guard] = []
        if under_mps:
            # The list counts the client's visible GPUs: the first one is 0, whatever its index on the machine.
            places = range(len(order.placement.gpus))
            environment[MEMORY_VARIABLE] = ",".join(f"{place}={cap_mib}M" for place in places)
            guards.append(Guard(rung="mps", limit_mib=cap_mib, how="MPS's memory limit, for each process"))
        limited = self._limits.guard(order, cap_mib) if self._limits is not None else None
        if limited is not None:
            # The card then appears as small as the limit. A framework's fraction would be a fraction of the limit.
            return [*guards, limited], ""
        caps = framework_caps(order, cap_mib, self._sharing.context_mib)
        environment |= caps.environment
        return [*guards, *caps.guards], caps.note


def needs_frameworks(order: LaunchOrder) -> bool:
    """Whether the limits of this attempt depend on the frameworks that its command imports."""
    booking = order.placement.booking
    return bool(order.gpus) and booking.cap_mib is not None and not booking.alone


def _refusal(order: LaunchOrder, why: str) -> Refused:
    if order.spec.mechanism == "mps":
        return Refused(
            f"the task asks for MPS, and MPS cannot be used: {why}",
            "Submit it without --mechanism mps; carma doctor says what MPS needs.",
        )
    return Refused(
        f"this server runs tasks under MPS only (sharing.mechanism = mps), and MPS cannot be used: {why}",
        "Ask the administrator; carma doctor says what MPS needs, and auto falls back to time slicing.",
    )


# The environment of a task.

# What experiment trackers read at the start of a run: MLflow a JSON object of tags (SystemEnvironmentContext), W&B a
# list with commas, whose tags have at most 64 characters. Without a tracker the variables have no effect. The marks
# tell tags of CARMA, which a submission from inside another task has, from the submitter's.
MLFLOW_TAGS, WANDB_TAGS = "MLFLOW_RUN_CONTEXT", "WANDB_TAGS"
_TAG_MARKS = {MLFLOW_TAGS: '{"carma.task_id"', WANDB_TAGS: "carma-task-"}
_WANDB_TAG_LETTERS = 64


def _of_another_job(name: str, value: str) -> bool:
    return name.startswith(_REMOVED) or (name in _TAG_MARKS and value.startswith(_TAG_MARKS[name]))


def tracker_variables(order: LaunchOrder) -> dict[str, str]:
    task, attempt, gpus = str(order.key.task), str(order.key.attempt), order.placement.gpus
    booked_mib = str(order.placement.booking.memory_mib)
    mlflow = {"task_id": task, "attempt": attempt, "gpus": ",".join(gpus), "gpu_memory_mib": booked_mib}
    wandb = (f"task-{task}", f"attempt-{attempt}", *(f"gpu-{gpu}" for gpu in gpus), f"booked-{booked_mib}-MiB")
    return {
        MLFLOW_TAGS: json.dumps({f"carma.{name}": value for name, value in mlflow.items()}),
        WANDB_TAGS: ",".join(f"carma-{tag}"[:_WANDB_TAG_LETTERS] for tag in wandb),
    }


def task_environment(order: LaunchOrder, extra: Mapping[str, str], *, tracker_tags: bool = True) -> dict[str, str]:
    """`extra`, of the server, overrides the submitter's variables; those of GPUs and task override both. Tags of the
    submitter for an experiment tracker replace CARMA's."""
    inherited = {name: value for name, value in order.spec.environment.items() if not _of_another_job(name, value)}
    tags = tracker_variables(order) if tracker_tags else {}
    return {**tags, **inherited, **extra, **gpu_variables(order), **task_variables(order)}


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
    return own if order.spec.slurm is None else {**own, **slurm_variables(order, order.spec.slurm)}


def slurm_variables(order: LaunchOrder, given: Mapping[str, str]) -> dict[str, str]:
    """What a script for sbatch expects. `given` comes from the submitter, who must not choose GPUs by it."""
    job, host, spec = str(order.key.task), os.uname().nodename, order.spec
    restarts = {"SLURM_RESTART_COUNT": str(order.key.attempt - 1)} if order.key.attempt > 1 else {}
    return {
        **{name: value for name, value in given.items() if name.startswith("SLURM_")},
        **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID"), job),
        **dict.fromkeys(("SLURMD_NODENAME", "SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_SUBMIT_HOST"), host),
        **dict.fromkeys(("SLURM_JOB_NUM_NODES", "SLURM_NNODES"), "1"),
        "SLURM_JOB_NAME": spec.name or program_name(spec.command),
        "SLURM_SUBMIT_DIR": spec.directory,
        "SLURM_GPUS_ON_NODE": str(len(order.placement.gpus)),
        "SLURM_JOB_GPUS": ",".join(str(gpu.index) for gpu in order.gpus),
        **restarts,
    }
