"""The Python interpreter that has torch, which is rarely CARMA's own. It is checked before a long run begins."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

import carma.trial
from carma.errors import NoGpus, Refused, Usage

INSIDE = Path(carma.trial.__file__).parent / "inside"  # CARMA's own modules that run in that interpreter
LIMIT_S = 300.0  # importing torch from a slow disk
_HINT = "--python selects an interpreter that has torch."
_ASK = """
import json, torch
print(json.dumps({"torch": torch.__version__, "gpu": torch.cuda.is_available()}))
"""


def environment(*folders: Path) -> dict[str, str]:
    """This process's environment, with INSIDE and these directories on the interpreter's module path."""
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(INSIDE), *map(str, folders), *([before] if before else [])])
    return {**os.environ, "PYTHONPATH": path}


def find_torch(wanted: str | None, *, with_gpu: bool) -> str:
    """The path of an interpreter that has torch; `python3` where none is named."""
    path, versions = ask_interpreter(wanted, _ASK, (), _HINT)
    if with_gpu and not versions["gpu"]:
        raise no_gpu(str(versions["torch"]), path)
    return path


def ask_interpreter(
    wanted: str | None, program: str, words: Sequence[str], hint: str
) -> tuple[str, dict[str, str | bool]]:
    """The interpreter's path, and the JSON that `program` prints under it. Links in the path are not resolved: a
    virtual environment is known by its link.
    """
    path = shutil.which(wanted or "python3")
    if path is None:
        raise Usage(f"there is no program {wanted or 'python3'}", hint)
    command = [path, "-c", program, *words]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Refused(f"{path} does not answer: {error}", hint) from error
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise Refused(f"{path} cannot run the training scripts: {last}", hint)
    return str(Path(path).absolute()), msgspec.json.decode(asked.stdout.splitlines()[-1], type=dict[str, str | bool])


def no_gpu(torch: str, path: str) -> NoGpus:
    return NoGpus(
        f"torch {torch} of {path} finds no GPU",
        "This measures a real NVIDIA GPU: run it where one is, with a CUDA build of torch.",
    )
