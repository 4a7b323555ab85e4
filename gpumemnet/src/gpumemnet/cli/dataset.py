"""`carma dataset`: the data set for learned estimators. Verbs import what they need when they are used."""

from __future__ import annotations

from pathlib import Path

import click

from carma.cli.option_types import names, whole
from carma.cli.verb import Verb
from gpumemnet import FAMILIES
from gpumemnet.cli import collect, describe, pack


class Datasets(Verb, click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(self.commands)  # in the order of their use


@click.group("dataset", cls=Datasets, examples="carma dataset generate --count 3000 --out configs.jsonl")
def command() -> None:
    """Create and describe the data that estimators learn from."""


@command.command(
    "generate",
    cls=Verb,
    examples=(
        "carma dataset generate --count 3000 --seed 1 --out configs.jsonl\n"
        "carma dataset generate --families cnn,mlp --count 10 --ranges mine.toml"
    ),
)
@click.option(
    "--families",
    type=names(FAMILIES),
    default=FAMILIES,
    help="Comma-separated families (default: mlp,cnn,transformer).",
)
@click.option(
    "--count", type=whole(1, 1_000_000), default=3_000, help="Number of configs of each family (default 3000)."
)
@click.option("--seed", type=whole(0), default=0, help="Seed; the same seed gives the same bytes (default 0).")
@click.option("--ranges", metavar="FILE", help="TOML file with ranges that replace the defaults.")
@click.option(
    "--out",
    metavar="FILE",
    default="configs.jsonl",
    help="Output file, one config a line; - for standard output (default configs.jsonl).",
)
@click.option("--force", is_flag=True, help="Overwrite a file that contains other configs.")
def generate(families: tuple[str, ...], count: int, seed: int, ranges: str | None, out: str, force: bool) -> int:
    """Draw random training runs, one line of JSON each.

    Footprints, batches, depths and widths are spread over their ranges. Neither torch nor a GPU is needed. An existing
    file may be written again or extended; a file with configs of another seed or other ranges is kept.
    """
    from carma.cli.error_output import note
    from gpumemnet.dataset.ranges import load_ranges
    from gpumemnet.dataset.recipe import write_recipe

    chosen = tuple(family for family in FAMILIES if family in families)
    loaded = load_ranges(Path(ranges) if ranges else None)
    far_off = write_recipe(chosen, count, seed, loaded, Path(out), force)
    written = f"{count * len(chosen):,} configs"
    if out in ("-", "/dev/stdout"):  # it has the configs
        note(written)
    else:
        click.echo(f"{written} in {out}")
    for family, missed in far_off.items():
        if missed:
            far = "not within a factor of 1.4 of the footprint that they were drawn for"
            note(f"{missed:,} of {count:,} {family} configs are {far}: nothing nearer was found in the ranges")
    return 0


for verb in (collect, pack, describe):
    command.add_command(verb.command)
