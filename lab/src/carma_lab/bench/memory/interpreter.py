"""The Python that has torch, torchvision and transformers, which the zoo's training runs need."""

from __future__ import annotations

from pathlib import Path

import msgspec

from carma.core.model.values import Record
from gpumemnet.dataset.torch_interpreter import ask_interpreter, no_gpu

ZOO = Path(__file__).parent / "zoo"
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
    """`python3` where none is named."""
    path, said = ask_interpreter(wanted, _ASK, (str(ZOO),), _HINT)
    found = msgspec.convert({**said, "path": path}, Interpreter)
    if with_gpu and not found.gpu:
        raise no_gpu(found.torch, path)
    return found
