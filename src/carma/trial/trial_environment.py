"""The environment of a trial run: the task's, with CARMA's part on Python's path and nothing that reaches outside."""

from __future__ import annotations

import json
import os
import re

from carma.core.ports import EstimateRequest
from carma.trial.box.special_directories import INSIDE, KEEP, OUT
from carma.trial.cards import CARDS, DEFAULT, Card, as_gpu, card_for

THREADS = "2"  # of a library that would take all processors; only shapes are computed
_MIB = 2**20
# Connections to other programs of the user, and variables of another task or scheduler.
_DROPPED = re.compile(
    r"SSH_AUTH_SOCK|SSH_AGENT_PID|DBUS_.*|DISPLAY|WAYLAND_DISPLAY|XAUTHORITY|XDG_RUNTIME_DIR|DOCKER_HOST|GPG_AGENT_INFO"
    r"|TMUX.*|CARMA_.*|CUDA_MPS_.*|SLURM_.*|SLURMD_.*|SRUN_.*|NOTIFY_SOCKET|LISTEN_.*|JOURNAL_STREAM"
)
# Services that a training reports to: each has a setting that switches it off.
_OFFLINE = {
    "WANDB_MODE": "disabled",
    "MLFLOW_TRACKING_URI": "file:/tmp/carma-trial-mlruns",
    "COMET_MODE": "disabled",
    "COMET_DISABLE_AUTO_LOGGING": "1",
    "NEPTUNE_MODE": "offline",
    "CLEARML_OFFLINE_MODE": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def trial_environment(request: EstimateRequest, steps: int) -> dict[str, str]:
    spec = request.spec
    own = {name: value for name, value in spec.environment.items() if not _DROPPED.fullmatch(name)}
    own.setdefault("OMP_NUM_THREADS", THREADS)
    own.setdefault("MKL_NUM_THREADS", own["OMP_NUM_THREADS"])
    own.setdefault("PATH", os.defpath)
    if spec.array is not None:  # scripts choose by it what they train
        own |= {"CARMA_ARRAY_INDEX": str(spec.array.index), "SLURM_ARRAY_TASK_ID": str(spec.array.index)}
        own |= {"CARMA_ARRAY_ID": str(spec.array.array), "SLURM_ARRAY_JOB_ID": str(spec.array.array)}
    if spec.slurm is not None:
        own |= {**spec.slurm, "SLURM_JOB_ID": str(request.task), "SLURM_SUBMIT_DIR": spec.directory}
    path = own.get("PYTHONPATH", "")
    return {
        **own,
        **_OFFLINE,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": f"{INSIDE}/hook" + (f":{path}" if path else ""),
        "PYTHONDONTWRITEBYTECODE": "1",  # it would be thrown away
        "CARMA_TRACE_OUT": OUT,
        "CARMA_TRACE_BUILD": KEEP,
        "CARMA_TRACE_STEPS": str(steps),
        "CARMA_TRACE_GPU": gpu_description(request),
    }


def gpu_description(request: EstimateRequest) -> str:
    """The emulated GPU: the first one of the server, with the properties of its model."""
    known = {card.alias: card for card in CARDS}[DEFAULT]
    gpu = request.gpus[0] if request.gpus else as_gpu(known)
    card: Card = card_for(gpu.name) or known
    return json.dumps(
        {
            "name": gpu.name,
            "memory_bytes": gpu.memory_mib * _MIB,
            "capability": list(card.capability),
            "multiprocessors": card.multiprocessors,
            "count": max(1, request.spec.gpus),
        },
        sort_keys=True,
    )
