"""`carma calibrate`: measures what libraries take on a GPU of this machine, so that estimates are right for it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from carma.cli.parsers import parse_grace
from carma.cli.task_flags import Parsed
from carma.cli.verb import verb

if TYPE_CHECKING:
    from carma.core.model.values import Gpu
    from carma.trial.calibrate import Measured

EXAMPLES = """
carma calibrate
carma calibrate --gpu 1 --limit 5m --python ~/envs/torch/bin/python
sudo carma calibrate                                              for all users of this machine
"""
SHORTEST_S = 20.0


def _limit(text: str) -> float:
    seconds = parse_grace(text)
    if seconds < SHORTEST_S:
        raise ValueError(f"{text!r} is too short; at least {SHORTEST_S:g}s are needed, and 90s for a good table")
    return seconds


@verb("calibrate", examples=EXAMPLES)
@click.option("--gpu", metavar="GPU", help="Index or UUID (the first).")
@click.option("--limit", "limit_s", type=Parsed("TIME", _limit), default="90s", help="How long to measure (90s).")
@click.option("--python", metavar="PATH", help="An interpreter that has torch (python3 of PATH).")
@click.option("--out", metavar="FILE", help="Write the card's file there, and the table beside it.")
@click.option("--json", "as_json", is_flag=True, help="The constants as JSON.")
def command(gpu: str | None, limit_s: float, python: str | None, out: str | None, as_json: bool) -> int:
    """Measure what libraries take on this machine's GPU, for estimates.

    CUDA's context and the workspaces of cuBLAS and cuDNN, for this card, this driver and this version of torch. It
    wants the GPU for itself.
    """
    from carma.paths import find_paths
    from carma.trial import calibrate
    from carma.trial.replay import card_constants as constants

    card = _chosen(gpu)
    found = calibrate.find_python(python, os.environ)
    with _progress(card, limit_s) as tell:
        measured = calibrate.measure(found.path, card.id, limit_s, os.environ, tell)
    file = Path(out) if out else constants.own_folder(find_paths(os.environ)) / constants.file_name(measured.constants)
    constants.save(measured.constants, measured.rows, file)
    if as_json:
        from carma.cli.output import print_json

        print_json(measured.constants)
    else:
        _print(measured, file)
    return 0


def _chosen(wanted: str | None) -> Gpu:
    """The GPU to measure on. Raises NoGpus where the driver does not answer."""
    import time

    from carma.cli.error_output import note
    from carma.errors import NoGpus, NotFound
    from carma.monitor.nvml import open_nvml

    try:
        sampler = open_nvml()
    except NoGpus as error:
        raise NoGpus(f"there is nothing to measure on: {error}", "Run it on a machine with an NVIDIA GPU.") from error
    try:
        gpus, samples = sampler.gpus(), sampler.sample(time.time())
    finally:
        sampler.close()
    gpu = next((gpu for gpu in gpus if wanted in (None, str(gpu.index), gpu.id)), None)
    if gpu is None:
        listed = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in gpus)
        raise NotFound(f"there is no GPU {wanted} on this machine", f"There are {listed}.")
    busy = [sample for sample in samples if sample.gpu == gpu.id and sample.processes]
    if busy:
        note(
            f"others are on GPU {gpu.index}: what libraries take differs on a full card; better do it while it is idle"
        )
    return gpu


@contextlib.contextmanager
def _progress(gpu: Gpu, limit_s: float) -> Iterator[Callable[[int], None]]:
    """A line on a terminal's stderr that counts; elsewhere one line at the start."""
    from carma.cli.error_output import note
    from carma.trial.calibrate import nobody

    what = f"measuring on GPU {gpu.index} ({gpu.name})"
    if not sys.stderr.isatty():
        note(f"{what}, {limit_s:g} s")
        yield nobody
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True, highlight=False), transient=True) as shown:
        task = shown.add_task(what, total=None)
        yield lambda rows: shown.update(task, description=f"{what}: {rows:,} rows")


def _print(measured: Measured, file: Path) -> None:
    """What was found, and where it is now."""
    from carma.cli.output import heading, print_facts
    from carma.core.model.units import show_mib

    known = measured.constants
    mib = 1 << 20
    least, most = (show_mib(known.context_mib(used)) for used in ((), {reading.after for reading in known.contexts}))
    blas = known.blas_workspace_bytes()
    heading(f"{known.gpu}, driver {known.driver}, torch {known.torch}, CUDA {known.cuda}, cuDNN {known.cudnn}")
    print_facts(
        [
            ("context", f"{least}, {most} with all libraries"),
            ("workspace", "" if blas is None else f"{show_mib(blas / mib)} for each thread that multiplies matrices"),
            ("table", f"{len(measured.rows):,} rows, {measured.errors:,} of them calls that a library refused"),
            ("written", str(file)),
        ]
    )
