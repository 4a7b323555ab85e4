"""The process of `carma dataset collect`: starts `inside/collect.py`, the measuring process, and counts its rows.

The measuring process runs in an interpreter that has torch and need not have CARMA. It appends its rows to a file.
This process reads the file as it grows.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from carma.core.model.values import Record
from carma.errors import Refused, Usage
from gpumemnet.dataset.clean import read_digests
from gpumemnet.dataset.config import read_configs
from gpumemnet.dataset.inside import rows
from gpumemnet.dataset.inside.forks import handled
from gpumemnet.dataset.torch_interpreter import environment
from gpumemnet.directories import HINT, make_folder

MAIN = Path(__file__).parent / "inside" / "collect.py"
ROWS = rows.NAME
POLL_S = 0.25
END_LIMIT_S = 10.0  # for the measuring processes to end after Ctrl-C
MAX_ERRORS = 3
ERROR_CHARS = 100


class CollectOptions(Record, frozen=True, kw_only=True):
    configs: Path
    out: Path
    parallel: int | None = None  # None: the default of the measuring process
    limit_s: float = 3600.0  # no training run starts after it
    run_limit_s: float = 60.0  # a training run that takes longer counts as failed
    activity: bool = False
    resume: bool = True
    seed: int = 0
    device: str = "cuda"


class Tally(Record, frozen=True, kw_only=True):
    measured: int
    oom: int
    failed: int
    left: int
    seconds: float
    per_s: float
    errors: dict[str, int]  # the most frequent; errors that differ only in numbers count as the first of them

    @property
    def done(self) -> int:
        return self.measured + self.oom + self.failed


class RowCounter:
    """Reads the file of rows as it grows and counts the configs that are done. `already`: the number at creation."""

    def __init__(self, file: Path, wanted: Mapping[str, str], activity: bool) -> None:
        """`wanted`: the configs' digests by their ids."""
        self._file, self._wanted, self._activity = file, wanted, activity
        self._read_to = 0
        self._states: dict[str, dict[str, Any]] = {}
        self.update()
        self.already = len(self._states)

    @property
    def done(self) -> int:
        return len(self._states)

    def update(self) -> int:
        """Reads new rows and returns the number of configs that are done. An incomplete line is read the next time."""
        with contextlib.suppress(FileNotFoundError), self._file.open("rb") as file:
            file.seek(self._read_to)
            whole, newline, _ = file.read().rpartition(b"\n")
            self._read_to += len(whole) + len(newline)
            for row in rows.read_rows(whole, self._activity):
                if row["id"] in self._wanted and row.get("of") in (None, self._wanted[row["id"]]):
                    self._states[row["id"]] = row
        return self.done

    def tally(self, seconds: float) -> Tally:
        states = self._states.values()
        errors = [row["error"] for row in states if row.get("error")]
        oom, failed = sum(bool(row.get("oom")) for row in states), len(errors)
        return Tally(
            measured=self.done - oom - failed,
            oom=oom,
            failed=failed,
            left=len(self._wanted) - self.done,
            seconds=round(seconds, 1),
            per_s=round((self.done - self.already) / max(seconds, 1e-9), 2),
            errors=most_frequent(errors),
        )


def most_frequent(errors: Iterable[str]) -> dict[str, int]:
    """Counts of the most frequent errors; errors that differ only in numbers count as the first of them."""
    times: Counter[str] = Counter()
    first: dict[str, str] = {}
    for error in errors:
        text = error.partition(" [")[0][:ERROR_CHARS]
        alike = re.sub(r"[0-9]+", "0", text)
        first.setdefault(alike, text)
        times[alike] += 1
    return {first[alike]: count for alike, count in times.most_common(MAX_ERRORS)}


class Terminated(KeyboardInterrupt):
    """SIGTERM, handled as Ctrl-C."""


def collect(
    options: CollectOptions, python: str, progress: Callable[[int, int], None] = lambda _done, _total: None
) -> Tally:
    """Measures configs until all are done or the time limit is reached. After Ctrl-C or SIGTERM the rows stay."""
    check_configs(options.configs)
    wanted = read_digests(options.configs)
    began_s = time.monotonic()
    with locked(options.out) as lock, handled(signal.SIGTERM, stop):
        if not options.resume:
            rows.set_aside(options.out / ROWS)
        counter = RowCounter(options.out / ROWS, wanted, options.activity)
        measure(command(options, python), lock, lambda: progress(counter.update(), len(wanted)))
    return counter.tally(time.monotonic() - began_s)


def check_configs(configs: Path) -> None:
    """Reads all configs, so that an invalid one is reported now."""
    if not list(read_configs(configs)):
        raise Usage(f"{configs} has no configs", "`carma dataset generate` makes some.")


def measure(words: Sequence[str], lock: int, update: Callable[[], None]) -> None:
    """Runs the measuring process. It inherits the lock: if this process is killed, the directory stays locked until the
    measuring process has ended."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            words,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(lock,),
        )
        try:
            while process.poll() is None:
                update()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_S)
        finally:
            end(process)
        update()
        if process.returncode:
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines() or ["no output"]
            raise Refused(
                f"measuring failed: {lines[-1].strip()[-400:]}", "Measured rows are kept; run the command again."
            )


def command(options: CollectOptions, python: str) -> Sequence[str]:
    words = [python, str(MAIN), str(options.configs), str(options.out), "--parent", str(os.getpid())]
    words += ["--limit-s", f"{options.limit_s:g}", "--seed", str(options.seed), "--device", options.device]
    words += ["--config-limit-s", f"{options.run_limit_s:g}"]
    words += ["--parallel", str(options.parallel)] if options.parallel else []
    return words + ["--activity"] * options.activity


@contextlib.contextmanager
def locked(out: Path) -> Iterator[int]:
    """Creates and locks the directory: two collectors would write to one file and measure each other."""
    make_folder(out)
    try:
        lock = rows.lock(out)
    except OSError as error:
        raise Usage(f"{out / rows.LOCK} cannot be written: {error.strerror}", HINT) from error
    except rows.InUse as error:
        raise Refused(f"{out} is in use: {error}", "Wait for it, end it, or use another directory.") from error
    try:
        yield lock
    finally:
        os.close(lock)


def stop(*_: object) -> None:
    """Handles SIGTERM, so that the processes are ended."""
    raise Terminated


def end(process: subprocess.Popen[bytes]) -> None:
    """Terminates the measuring process, which ends its children. After END_LIMIT_S it is killed with its children."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(END_LIMIT_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
