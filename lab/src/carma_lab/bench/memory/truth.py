"""`carma bench memory-truth`: memory that the zoo's training runs take on this machine's GPU.

The measuring itself is `zoo/truth.py`, run by the interpreter that has torch. This half finds that interpreter, writes
the cases and counts their results.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import msgspec

from carma.core.model.values import Record
from carma.errors import Refused, Usage
from carma_lab.bench.memory.cases import all_cases
from gpumemnet.dataset.collect import MAIN
from gpumemnet.dataset.torch_interpreter import ask_interpreter, environment, no_gpu

INNER = MAIN.parent  # the processes that measure are those of the data set
ROWS = "truth.jsonl"
CASES = "cases.jsonl"
ZOO = Path(__file__).parent / "zoo"
_HINT = "--python names one that has torch, torchvision and transformers."
_ASK = """
import json, platform, sys
sys.path.insert(0, sys.argv[1])
import torch, transformers, models_vision
facts = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
facts["torchvision"] = models_vision.import_torchvision().__version__
print(json.dumps(facts | {"gpu": torch.cuda.is_available()}))
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
    path, facts = ask_interpreter(wanted, _ASK, (str(ZOO),), _HINT)
    found = msgspec.convert({**facts, "path": path}, Interpreter)
    if with_gpu and not found.gpu:
        raise no_gpu(found.torch, path)
    return found


class Options(Record, frozen=True, kw_only=True):
    out: str
    python: str | None = None
    parallel: int = 5
    limit_s: float = 540.0
    first: int = 0
    seed: int = 0


def run(options: Options, interpreter: Interpreter | None = None) -> int:
    """Rows are added to OUT/truth.jsonl as they come; runs that it already has are not made again."""
    out = Path(options.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Usage(f"{out} cannot be made: {error.strerror}", "Name a directory that you may write to.") from error
    found = interpreter or find_interpreter(options.python, with_gpu=True)
    cases = out / CASES
    cases.write_bytes(b"\n".join(map(msgspec.json.encode, all_cases())) + b"\n")
    ended = subprocess.run(_command(options, found, cases, out), env=environment(INNER), check=False)
    measured, failed = count(out / ROWS)
    print(f"{out / ROWS}: {measured} runs measured, {failed} failed")
    if ended.returncode:
        raise Refused(f"the measuring ended with status {ended.returncode}", "What it printed above says why.")
    return 0 if measured else 1


def _command(options: Options, found: Interpreter, cases: Path, out: Path) -> list[str]:
    words = [found.path, str(ZOO / "truth.py"), str(cases), str(out)]
    words += ["--parallel", str(options.parallel), "--limit-s", f"{options.limit_s:g}", "--seed", str(options.seed)]
    words += ["--first", str(options.first)] if options.first else []
    if (out / ROWS).exists():
        words += ["--skip", str(out / ROWS)]
    return words


def count(rows: Path) -> tuple[int, int]:
    """Runs that were measured, and those that only failed."""
    if not rows.exists():
        return 0, 0
    lines = [msgspec.json.decode(line, type=dict[str, Any]) for line in rows.read_bytes().splitlines()]
    measured = {row["id"] for row in lines if row.get("id") and not row.get("error")}
    return len(measured), len({row["id"] for row in lines if row.get("id")} - measured)
