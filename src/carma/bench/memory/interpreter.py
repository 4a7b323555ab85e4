"""The Python that has torch: CARMA's own rarely does. It is asked before minutes are spent on it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import msgspec

from carma.core.model import Record
from carma.errors import NoGpus, Refused, Usage

ZOO = Path(__file__).parent / "zoo"
LIMIT_S = 300.0  # importing them all from a slow disk
_HINT = "--python names one that has torch, torchvision and transformers."
_ASK = """
import json, platform, sys
sys.path.insert(0, sys.argv[1])
import torch, transformers, ops
said = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
said["torchvision"] = ops.import_torchvision().__version__
print(json.dumps(said | {"gpu": torch.cuda.is_available()}))
"""


class Interpreter(Record, frozen=True, kw_only=True):
    path: str
    python: str
    torch: str
    torchvision: str
    transformers: str
    gpu: bool

    @property
    def versions(self) -> dict[str, str]:
        return {name: getattr(self, name) for name in ("python", "torch", "torchvision", "transformers")}


def find_interpreter(wanted: str | None, *, with_gpu: bool = False) -> Interpreter:
    """`python3` where none is named. The path stays as it is found: a virtual environment is known by its link."""
    path = shutil.which(wanted or "python3")
    if path is None:
        raise Usage(f"there is no program {wanted or 'python3'}", _HINT)
    try:
        asked = subprocess.run(
            [path, "-c", _ASK, str(ZOO)], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Refused(f"{path} does not answer: {error}", _HINT) from error
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise Refused(f"{path} cannot run the training scripts: {last}", _HINT)
    said = msgspec.json.decode(asked.stdout.splitlines()[-1], type=dict[str, str | bool])
    found = msgspec.convert({**said, "path": str(Path(path).absolute())}, Interpreter)
    if with_gpu and not found.gpu:
        raise NoGpus(
            f"torch {found.torch} of {path} finds no GPU",
            "This measures a real NVIDIA GPU: run it where one is, with a CUDA build of torch.",
        )
    return found
