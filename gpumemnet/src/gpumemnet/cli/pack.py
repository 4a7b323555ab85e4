"""`carma dataset pack`: configs and what was measured, as files to learn from."""

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


@verb("pack", examples=EXAMPLES)
@click.argument("configs", metavar="CONFIGS", type=click.Path(path_type=Path))
@click.argument("rows", metavar="ROWS...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--layers", metavar="FILE", type=click.Path(path_type=Path), default=Path("layers.jsonl"),
              help="Layers of each config; what is missing is added (layers.jsonl).")  # fmt: skip
@click.option(
    "--out", metavar="DIR", type=click.Path(path_type=Path), required=True, help="One file a family goes there."
)
@click.option("--python", metavar="PATH", default="python3", help="An interpreter that has torch (python3).")
@click.option(
    "--parallel", "processes", cls=Renamed, was=("--processes",), type=whole(1, 256), default=2,
    help="So many processes that list layers, side by side (2).",
)  # fmt: skip
@json_flag
def command(
    configs: Path, rows: tuple[Path, ...], layers: Path, out: Path, python: str, processes: int, as_json: bool
) -> None:
    """Put configs and measured rows into a data set.

    Lists each model's layers, which needs torch and no GPU, drops rows that cannot be used and says why. A file that is
    there is extended; a row whose id is there takes its place.
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

        rows_said = f"none of {packed.report.rows:,} measured rows can be used" if packed.report.rows else "no rows"
        raise Refused(f"nothing was packed: {rows_said}", "`carma dataset collect` measures these configs.")


def _print(packed: Packed) -> None:
    report = packed.report
    click.echo(f"{report.rows:,} rows measured, {report.kept:,} configs kept, {report.oom:,} of them out of memory")
    for why, count in report.dropped.items():
        click.echo(f"  {count:,} left out: {why} (as {report.examples[why]})")
    if packed.untied:
        click.echo(f"  {packed.untied:,} were measured with weights apart that the config had tied; they are kept so")
    for name, count in packed.files.items():
        click.echo(f"{name}: {count:,} rows, {packed.file_bytes[name]:,} bytes")
