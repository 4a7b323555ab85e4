"""`carma calibrate`: measure the GPU memory of CUDA libraries, for estimates."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from carma.cli.error_output import note
from carma.cli.option_types import duration
from carma.cli.output import heading, print_facts, print_json, spinner
from carma.cli.verb import verb
from carma.core.model.units import show_mib
from carma.errors import NoGpus, NotFound
from carma.paths import find_paths

if TYPE_CHECKING:
    from carma.core.model.values import Gpu
    from carma.trial.calibrate import Calibration

EXAMPLES = """
carma calibrate
carma calibrate --gpu 1 --limit 5m --python ~/envs/torch/bin/python
sudo carma calibrate                                              for all users of this machine
"""
MIN_LIMIT_S = 20.0


@verb("calibrate", examples=EXAMPLES)
@click.option("--gpu", metavar="GPU", help="Index or UUID of the GPU (default: the first).")
@click.option("--limit", "limit_s", type=duration(MIN_LIMIT_S), default="90s", help="Measuring time (default 90s).")
@click.option("--python", metavar="PATH", help="Python interpreter with torch (default: python3 of PATH).")
@click.option("--out", metavar="FILE", help="File for the constants of the card; the table is written beside it.")
@click.option("--json", "as_json", is_flag=True, help="Print the constants as JSON.")
def command(gpu: str | None, limit_s: float, python: str | None, out: str | None, as_json: bool) -> int:
    """Measure the GPU memory of CUDA libraries on this machine, for estimates.

    Measured are the CUDA context and the workspaces of cuBLAS and cuDNN, for this card, driver and version of torch.
    The GPU should be idle.
    """
    from carma.trial import calibrate
    from carma.trial.replay import card_constants as constants

    card = _chosen(gpu)
    interpreter = calibrate.find_python(python, os.environ)
    with _progress(card, limit_s) as report:
        measured = calibrate.measure(interpreter, card.id, limit_s, os.environ, report)
    file = Path(out) if out else constants.own_folder(find_paths(os.environ)) / constants.file_name(measured.constants)
    constants.save(measured.constants, measured.rows, file)
    if as_json:
        print_json(measured.constants)
    else:
        _print(measured, file)
    return 0


def _chosen(wanted: str | None) -> Gpu:
    """The GPU to measure. Raises NoGpus if the driver does not answer."""
    from carma.monitor.nvml import open_nvml

    try:
        sampler = open_nvml()
    except NoGpus as error:
        raise NoGpus(f"no GPU to measure: {error}", "run it on a machine with an NVIDIA GPU") from error
    try:
        gpus, samples = sampler.gpus(), sampler.sample(time.time())
    finally:
        sampler.close()
    gpu = next((gpu for gpu in gpus if wanted in (None, str(gpu.index), gpu.id)), None)
    if gpu is None:
        listed = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in gpus)
        raise NotFound(f"there is no GPU {wanted} on this machine", f"its GPUs: {listed}")
    if any(sample.gpu == gpu.id and sample.processes for sample in samples):
        note(f"other processes use GPU {gpu.index}: results differ on a full card, so measure an idle GPU if possible")
    return gpu


@contextlib.contextmanager
def _progress(gpu: Gpu, limit_s: float) -> Iterator[Callable[[int], None]]:
    """A counting line on a terminal; otherwise one note at the start."""
    what = f"measuring on GPU {gpu.index} ({gpu.name})"
    if not sys.stderr.isatty():
        note(f"{what}, {limit_s:g} s")
    with spinner(what) as describe:
        yield lambda rows: describe(f"{what}: {rows:,} rows")


def _print(measured: Calibration, file: Path) -> None:
    known = measured.constants
    least, most = (show_mib(known.context_mib(used)) for used in ((), {reading.after for reading in known.contexts}))
    blas = known.blas_workspace_bytes()
    heading(f"{known.gpu}, driver {known.driver}, torch {known.torch}, CUDA {known.cuda}, cuDNN {known.cudnn}")
    print_facts(
        [
            ("context", f"{least}, {most} with all libraries"),
            ("workspace", "" if blas is None else f"{show_mib(blas / 2**20)} for each thread that multiplies matrices"),
            ("table", f"{len(measured.rows):,} rows, {measured.errors:,} of them calls that a library refused"),
            ("written", str(file)),
        ]
    )
