"""`carma train`: learns memory estimators from the data set, and evaluates them on unseen rows."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

import click

from carma.cli.option_types import names, whole
from carma.cli.verb import Renamed, json_flag, verb
from gpumemnet import FAMILIES
from gpumemnet.training import NAMES

if TYPE_CHECKING:
    from gpumemnet.training.accuracy_report import Entry

EXAMPLES = """
carma train gpumemnet/datasets/h200/*.parquet --out models
carma train gpumemnet/datasets/mine/*.parquet --install
carma train gpumemnet/datasets/h200/cnn.parquet --out models --only mlp-based --seed 1
carma train gpumemnet/datasets/h200/*.parquet --public-mlp mlp_data_step2.csv --evaluate
"""


EXTRA = ("torch", "scikit-learn", "pyarrow", "onnx", "onnxscript", "matplotlib")  # packages of the extra `train`
MODULES = {"scikit-learn": "sklearn"}  # of packages with another name


@verb("train", examples=EXAMPLES)
@click.argument("data", nargs=-1, metavar="DATA...")
@click.option("--out", metavar="DIR", default="", help="Directory for ONNX models learned from all rows.")
@click.option("--install", is_flag=True, help="As --out, with the directory that your estimates read first.")
@click.option("--evaluate", is_flag=True, help="Evaluate all learners on unseen rows.")
@click.option(
    "--report",
    metavar="DIR",
    default="lab/results/gpumemnet",
    help="Directory for results of --evaluate (default lab/results/gpumemnet).",
)
@click.option(
    "--families", cls=Renamed, was=("--family",), type=names(FAMILIES), default=(),
    help="Comma-separated families (default: mlp,cnn,transformer).",
)  # fmt: skip
@click.option(
    "--only", type=names(NAMES), default=(), help="Comma-separated learners, such as mlp-based (default: all)."
)
@click.option(
    "--public-mlp", metavar="CSV", default="", help="File of GPUMemNet's public MLP data, to evaluate on it too."
)
@click.option(
    "--shapes/--no-shapes", default=True, help="Also evaluate on network shapes that were left out (default yes)."
)
@click.option("--seed", type=whole(0), default=0, help="Seed of all random decisions (default 0).")
@json_flag
def command(as_json: bool, **flags: Any) -> int:
    """Learn memory estimators from measured runs.

    DATA are files of `carma dataset pack`. The same data and seed give the same models. Two processor cores are used.
    Models take minutes, --evaluate tens of minutes. The extra `train` must be installed.
    """
    from carma.errors import Usage

    if flags["install"]:
        if flags["out"]:
            raise Usage("--install and --out exclude each other", "Use one of them.")
        from gpumemnet.serving.model import own_folder

        flags["out"] = str(own_folder(os.environ))
    if not flags["out"] and not flags["evaluate"]:
        raise Usage(
            "there is nothing to do",
            "--out DIR or --install writes models, --evaluate evaluates learners; both may be used together.",
        )
    check_extra()
    from gpumemnet.training.main import Options, run

    def tell(text: str) -> None:
        click.echo(text, err=True)

    done = run(Options(**flags), tell)
    if as_json:
        from carma.cli.output import print_json

        print_json(done)
        return 0
    _print(done.entries)
    for path in (*done.models, *([done.report] if done.report else [])):
        click.echo(path)
    return 0


def check_extra() -> None:
    from carma.errors import Refused

    missing = [package for package in EXTRA if importlib.util.find_spec(MODULES.get(package, package)) is None]
    if missing:
        # Never carma[train]: on the public index that name is another project's.
        raise Refused(f"not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}")


def _print(entries: tuple[Entry, ...]) -> None:
    """Results at the operating point; the report has all others."""
    for entry in entries:
        where = "3 folds" if entry.protocol == "folds" else "shapes left out"
        for point, one in ((judged.point, judged.classes) for judged in entry.judged):
            if point in ("operating", "class") and not one.top_merged:
                shares = (
                    f"{100 * one.accuracy:5.1f} % right, {100 * one.under:4.1f} % under, {100 * one.over:4.1f} % over"
                )
                click.echo(f"{entry.data:12} {entry.learner:18} {where:16} {one.width_gb} GB: {shares}")
