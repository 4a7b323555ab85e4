"""`carma train`: learns the estimators of memory from the data set, and judges them on what they have not seen."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

import click

from carma.cli.option_types import whole
from carma.cli.verb import Renamed, json_flag, verb

if TYPE_CHECKING:
    from gpumemnet.training.accuracy_report import Entry

EXAMPLES = """
carma train gpumemnet/datasets/h200/*.parquet --out models
carma train gpumemnet/datasets/mine/*.parquet --install
carma train gpumemnet/datasets/h200/cnn.parquet --out models --only mlp-based --seed 1
carma train gpumemnet/datasets/h200/*.parquet --public-mlp mlp_data_step2.csv --evaluate
"""


class Chosen(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """`mlp,cnn`: some of the names that `known` gives; asked late, so that help imports nothing."""

    name = "names"

    def __init__(self, known: str) -> None:
        self.known = known

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        from gpumemnet.training import names

        known: tuple[str, ...] = getattr(names, self.known)
        words = tuple(dict.fromkeys(word.strip() for word in str(value).split(",") if word.strip()))
        if not words:
            self.fail(f"no name was given; there are {', '.join(known)}", param, ctx)
        for word in words:
            if word not in known:
                self.fail(f"there is no {word!r}; there are {', '.join(known)}", param, ctx)
        return words


@verb("train", examples=EXAMPLES)
@click.argument("data", nargs=-1, metavar="DATA...")
@click.option("--out", metavar="DIR", default="", help="Learn from all rows and write the models there, as ONNX.")
@click.option("--install", is_flag=True, help="As --out, to where your estimates look for models first.")
@click.option("--evaluate", is_flag=True, help="Judge all learners on rows that they have not seen.")
@click.option(
    "--report",
    metavar="DIR",
    default="lab/results/gpumemnet",
    help="For figures of --evaluate (lab/results/gpumemnet).",
)
@click.option(
    "--families", cls=Renamed, was=("--family",), type=Chosen("FAMILIES"), default=(),
    help="Not all of mlp, cnn, transformer, but these.",
)  # fmt: skip
@click.option("--only", type=Chosen("NAMES"), default=(), help="Not all learners: mlp-based,transformer-based.")
@click.option("--public-mlp", metavar="CSV", default="", help="Judge on GPUMemNet's public MLP data too.")
@click.option("--shapes/--no-shapes", default=True, help="Judge on shapes of networks that were left out (yes).")
@click.option("--seed", type=whole(0), default=0, help="Of everything that chance decides (0).")
@json_flag
def command(as_json: bool, **flags: Any) -> int:
    """Learn how much memory models take, from measured runs.

    DATA are files of `carma dataset pack`. The same data and seed give the same models. Two processor cores are used;
    the models take minutes, --evaluate some tens of them. Needs the extra `train`.
    """
    from carma.errors import Usage

    if flags["install"]:
        if flags["out"]:
            raise Usage("--install is a place: --out has no meaning beside it", "Give one of them.")
        flags["out"] = _own_folder()
    if not flags["out"] and not flags["evaluate"]:
        raise Usage(
            "there is nothing to do",
            "--out DIR or --install makes models, --evaluate judges learners; they go together.",
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


def _own_folder() -> str:
    from gpumemnet.serving.model import own_folder

    return str(own_folder(os.environ))


def check_extra() -> None:
    from carma.errors import Refused
    from gpumemnet.training.names import EXTRA

    missing = [package for module, package in EXTRA.items() if importlib.util.find_spec(module) is None]
    if missing:
        # Never carma[train]: on the public index that name is another project's.
        raise Refused(f"not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}")


def _print(entries: tuple[Entry, ...]) -> None:
    """At the operating point; every other figure is in the report."""
    for entry in entries:
        for judged in entry.judged:
            if judged.point in ("operating", "class") and not judged.classes.top_merged:
                one = judged.classes
                where = "3 folds" if entry.protocol == "folds" else "shapes left out"
                shares = (
                    f"{100 * one.accuracy:5.1f} % right, {100 * one.under:4.1f} % under, {100 * one.over:4.1f} % over"
                )
                click.echo(f"{entry.data:12} {entry.learner:18} {where:16} {one.width_gb} GB: {shares}")
