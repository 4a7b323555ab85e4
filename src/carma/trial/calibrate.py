"""The outer half of `carma calibrate`: runs `inside/carma_measure` and makes a GPU's files from its rows.

The user's interpreter, which has torch and no CARMA, does the measuring.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from carma.errors import NotRunnable, Refused
from carma.trial.replay.card_constants import CardConstants, ContextReading, Row

MAIN = Path(__file__).parent / "inside" / "carma_measure" / "main.py"
AFTER_LIMIT_S = 120.0  # for the start of the interpreter, and calls that were begun in time
POLL_S = 0.25
ERROR_CHARS = 400  # of a failed run's last line
PROBE = "import torch; print('torch', torch.__version__, torch.version.cuda or '-')"
PYTHONS = ("python3", "python")
TEXTS = ("gpu", "driver", "torch", "cuda", "cudnn", "python", "date")


class Calibration(NamedTuple):
    constants: CardConstants
    rows: list[Row]
    errors: int  # calls that the libraries refused; they are among the rows


def find_python(given: str | None, environ: Mapping[str, str]) -> str:
    """The given interpreter, else the first on PATH with torch built for CUDA."""
    tried: list[str] = []
    for name in (given,) if given is not None else PYTHONS:
        path = shutil.which(name, path=environ.get("PATH"))
        if path is None:
            tried.append(f"{name} is not there")
            continue
        problem = _problem_of(path, environ)
        if problem is None:
            return path
        tried.append(problem)
    raise NotRunnable(
        f"no Python with torch for CUDA was found: {'; '.join(tried)}",
        "Activate the environment that tasks use, or name its interpreter: carma calibrate --python PATH.",
    )


def _problem_of(path: str, environ: Mapping[str, str]) -> str | None:
    """Why this interpreter cannot measure; None if it can."""
    try:
        done = subprocess.run(
            [path, "-c", PROBE], env=dict(environ), capture_output=True, text=True, timeout=AFTER_LIMIT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{path} cannot be run ({error})"
    match = re.search(r"^torch (\S+) (\S+)$", done.stdout, re.MULTILINE)
    if match is None:
        return f"{path} has no torch ({_last_line(done.stderr) or f'exit code {done.returncode}'})"
    return f"{path} has torch {match[1]}, built without CUDA" if match[2] == "-" else None


def measure(
    python: str,
    gpu: str,
    limit_s: float,
    environ: Mapping[str, str],
    progress: Callable[[int], None] = lambda _rows: None,
) -> Calibration:
    """Measures the GPU of that UUID, the only visible one; `progress` gets the number of rows so far.

    Ctrl-C ends measuring and removes all its files.
    """
    with tempfile.TemporaryDirectory(prefix="carma-calibrate-") as folder:
        out, log = Path(folder, "out"), Path(folder, "log")
        out.mkdir()
        words = [python, str(MAIN), "--out", str(out), "--limit-s", f"{limit_s:g}", "--parallel", str(_parallel())]
        with log.open("wb") as output:
            process = subprocess.Popen(
                words,
                env={**environ, "CUDA_VISIBLE_DEVICES": gpu},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its workers can be killed with it
            )
            try:
                _wait(process, time.monotonic() + limit_s + AFTER_LIMIT_S, out / "rows.jsonl", progress)
            finally:
                _end(process)
        if process.returncode != 0:
            raise Refused(
                f"measuring failed (exit code {process.returncode}): {_last_line(_read(log)) or 'it printed nothing'}",
                "See that the GPU is free and that torch works on it: python -c 'import torch; torch.ones(1).cuda()'.",
            )
        return read_measured(_lines(out / "constants.jsonl"), _lines(out / "rows.jsonl"))


def read_measured(constants: Sequence[Row], rows: Sequence[Row]) -> Calibration:
    """The output of `inside/carma_measure` as a GPU's constants and its table."""
    versions = next((row for row in constants if "versions" in row), {})
    if not versions.get("gpu") or versions["gpu"] == "none":
        raise Refused("the measuring did not say which GPU it ran on", "Run it again with a longer --limit.")
    contexts = tuple(_contexts(constants))
    if not contexts:
        raise Refused("no reading of the memory outside the allocator came back", "Run it again with a longer --limit.")
    table = [row for row in rows if "versions" not in row and not row.get("short")]
    texts = {name: str(versions[name]) for name in TEXTS if versions.get(name) is not None}
    more = {"contexts": contexts, "kept_once": _kept_once(constants), "rows": len(table)}
    made = msgspec.convert({**texts, **more, "capability": versions.get("capability") or None}, CardConstants)
    return Calibration(made, table, sum("error" in row for row in table))


def _contexts(rows: Sequence[Row]) -> Iterator[ContextReading]:
    """The long chain of steps, then each step in a process of its own if that was measured."""
    for row in rows:
        steps, outside = row.get("steps"), row.get("outside_bytes")
        if row.get("op") != "constant" or not isinstance(steps, list) or not isinstance(outside, int):
            continue
        alone = len(steps) == 1
        if outside > 0 and not (alone and row["after"] == "init"):
            yield ContextReading(after=str(row["after"]), alone=alone, outside_bytes=outside)


def _kept_once(rows: Sequence[Row]) -> dict[str, int]:
    """Memory that a first call kept and a later one of the same kind did not."""
    kept: dict[tuple[str, object], int] = {}
    for row in rows:
        if row.get("op") == "first_call" and isinstance(row.get("kept_bytes"), int):
            key = f"{row['name']}_{row['dtype']}_{row['direction']}"
            kept[key, row["call"]] = msgspec.convert(row["kept_bytes"], int)
    found = {key: size - kept.get((key, 3), size) for (key, call), size in kept.items() if call == 1}
    return {key: size for key, size in sorted(found.items()) if size > 0}


def _wait(process: subprocess.Popen[bytes], until_s: float, rows: Path, progress: Callable[[int], None]) -> None:
    """Waits until the process ends or the time is over. The caller then kills it, and it counts as failed."""
    while process.poll() is None and time.monotonic() < until_s:
        progress(_count(rows))
        try:
            process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            continue


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills a running process with its workers, which share its session. An ended one has waited for its workers."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _parallel() -> int:
    """Each worker has a CUDA context; more workers than processors do not help."""
    return max(2, min(8, len(os.sched_getaffinity(0))))


def _lines(file: Path) -> list[Row]:
    """The rows of a file; an incomplete last one is ignored."""
    if not file.is_file():
        return []
    decoder = msgspec.json.Decoder(Row)
    found: list[Row] = []
    for line in file.read_bytes().splitlines():
        try:
            found.append(decoder.decode(line))
        except msgspec.DecodeError:
            continue
    return found


def _count(file: Path) -> int:
    try:
        return max(0, file.read_bytes().count(b"\n") - 1)
    except OSError:
        return 0


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][-ERROR_CHARS:] if lines else ""
