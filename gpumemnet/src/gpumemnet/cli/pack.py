"""`carma dataset pack`: writes configs and measured rows as files to learn from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from carma.cli.option_types import whole
from carma.cli.verb import Renamed, json_flag, verb

if TYPE_CHECKING:
    from gpumemnet.dataset.pack import Packed

EXAMPLES = """
carma dataset pack configs.jsonl measured/rows.jsonl --out gpumemnet/datasets/h200
carma dataset pack configs.jsonl m/rows.jsonl a/rows.jsonl --layers layers.jsonl --out gpumemnet/datasets/h200
"""


@verb("pack", examples=EXAMPLES, short_help="Write the data set's files from collected rows.")
@click.argument("configs", metavar="CONFIGS", type=click.Path(path_type=Path))
@click.argument("rows", metavar="ROWS...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--layers", metavar="FILE", type=click.Path(path_type=Path), default=Path("layers.jsonl"),
              help="File with the layers of each config; missing ones are added (default layers.jsonl).")  # fmt: skip
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(path_type=Path),
    required=True,
    help="Output directory, one file for each family.",
)
@click.option("--python", metavar="PATH", default="python3", help="Python interpreter with torch (default: python3).")
@click.option(
    "--parallel", "processes", cls=Renamed, was=("--processes",), type=whole(1, 256), default=2,
    help="Number of processes that list layers (default 2).",
)  # fmt: skip
@json_flag
def command(
    configs: Path, rows: tuple[Path, ...], layers: Path, out: Path, python: str, processes: int, as_json: bool
) -> None:
    """Write configs and measured rows to the files of a data set.

    The layers of each model are listed, which needs torch and no GPU. Rows that cannot be used are left out with a
    reason. An existing file is extended, and rows with a known id are replaced.
    """
    from gpumemnet.dataset.layer_lists import Lister
    from gpumemnet.dataset.pack import pack

    packed = pack(configs, rows, out, Lister(python, layers, processes))
    if as_json:
        from carma.cli.output import print_json

        print_json(packed)
    else:
        _print(packed)
    if not packed.files:
        from carma.errors import Refused

        reason = f"none of {packed.report.rows:,} measured rows can be used" if packed.report.rows else "no rows"
        raise Refused(f"nothing was packed: {reason}", "`carma dataset collect` measures these configs.")


def _print(packed: Packed) -> None:
    report = packed.report
    click.echo(f"{report.rows:,} rows measured, {report.kept:,} configs kept, {report.oom:,} of them out of memory")
    for why, count in report.dropped.items():
        click.echo(f"  {count:,} left out: {why} (as {report.examples[why]})")
    if packed.untied:
        change = "were measured with separate weights although their config shared them; the config is corrected"
        click.echo(f"  {packed.untied:,} {change}")
    for name, count in packed.files.items():
        click.echo(f"{name}: {count:,} rows, {packed.file_bytes[name]:,} bytes")
