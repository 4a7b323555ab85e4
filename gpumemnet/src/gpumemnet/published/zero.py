"""DeepSpeed's `estimate_zero{2,3}_model_states_mem_needs` (ZeRO: Rajbhandari et al., SC 2020, arXiv 1910.02054).

The library's own functions are called in a process of their own, because importing DeepSpeed imports torch, which the
daemon never does. Nothing is offloaded to the host, and the GPUs of the task are on one node.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from functools import partial
from typing import Literal

import msgspec

from carma.core.model.values import NoEstimate
from carma.core.ports import EstimateRequest
from carma.trial.layers.description import Described
from carma.trial.protocol import Trials
from gpumemnet.published.common import Found, Parts, Published, parameters_of

IMPORT_LIMIT_S = 120.0  # importing DeepSpeed takes seconds; a hung import must not block the estimator
_STATES_ONLY = "counts weights, gradients and optimizer state only: no activations, no workspaces, no CUDA context"
_MIXED = "takes 16-bit training with Adam under ZeRO for granted, whatever the script does"

# DeepSpeed prints when it is imported, so the answer is marked.
_MARK = "carma-answer:"
_PROGRAM = {
    2: """
import sys
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as needs
parameters, _, gpus = map(int, sys.argv[1:])
print("\\ncarma-answer:%d" % needs(parameters, gpus, 1, cpu_offload=False)[1])
""",
    3: """
import sys
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as needs
parameters, largest, gpus = map(int, sys.argv[1:])
print("\\ncarma-answer:%d" % needs(parameters, largest, gpus, 1, cpu_offload=False, cpu_offload_params=False)[1])
""",
}


def _zero(stage: Literal[2, 3], trials: Trials, request: EstimateRequest) -> Found:
    if importlib.util.find_spec("deepspeed") is None:
        install = f"install it with: {sys.executable} -m pip install deepspeed"
        return f"DeepSpeed is not installed in CARMA's environment; {install}"
    described = trials.describe(request)
    if isinstance(described, NoEstimate):
        return described
    needed = _ask_library(stage, described, max(request.spec.gpus, 1))
    return needed if isinstance(needed, str) else Parts({"model states": needed}, (_STATES_ONLY, _MIXED))


def _ask_library(stage: Literal[2, 3], described: Described, gpus: int) -> int | str:
    """Bytes for each GPU, or why there is no figure."""
    largest = max((layer.parameters for layer in described.layers), default=0)
    command = [sys.executable, "-c", _PROGRAM[stage], str(parameters_of(described)), str(largest), str(gpus)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"DeepSpeed could not be imported within {IMPORT_LIMIT_S:g} s"
    answers = [line.removeprefix(_MARK) for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode != 0 or not answers:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return f"DeepSpeed cannot be used: {lines[-1]}"
    return msgspec.convert(answers[-1], int, strict=False)


make_zero2 = partial(Published, "zero2", partial(_zero, 2))
make_zero3 = partial(Published, "zero3", partial(_zero, 3))
