"""`carma dataset describe`: the content of a data set, in figures and plots."""

from __future__ import annotations

from pathlib import Path

import click

from carma.cli.option_types import whole
from carma.cli.verb import json_flag, verb
from gpumemnet.cli.output_file_option import check_pictures, folder_flag, force_flag

EXAMPLES = """
carma dataset describe gpumemnet/datasets/h200/mlp.parquet
carma dataset describe gpumemnet/datasets/h200/*.parquet --out pictures
"""


@verb("describe", examples=EXAMPLES, short_help="Print and plot the content of a data set.")
@click.argument("files", metavar="FILES...", nargs=-1, required=True, type=click.Path(path_type=Path))
@folder_flag("Directory for plots as PNG and SVG.")
@click.option("--seed", type=whole(0), default=0, help="Seed of t-SNE (default 0).")
@force_flag
@json_flag
def command(files: tuple[Path, ...], out: Path | None, seed: int, force: bool, as_json: bool) -> None:
    """Print the content of a data set: counts, ranges, classes and settings.

    With --out it also plots the coverage of the features, the steps of reserved memory, PCA and t-SNE coloured by
    memory class, and activity against size.
    """
    from gpumemnet.dataset.describe import describe, text
    from gpumemnet.dataset.table import read

    tables = [read(file) for file in files]
    if out is not None:
        from gpumemnet.dataset.plots import files_of

        check_pictures(out, files_of(tables), force)
    families = [describe(table) for table in tables]
    if as_json:
        from carma.cli.output import print_json

        print_json(families)
    else:
        click.echo(text(families))
    if out is not None:
        from gpumemnet.dataset.plots import draw

        for name in draw(tables, out, seed):
            click.echo(str(name), err=True)
