"""`carma dataset`: the data that learned estimators are made from. A verb's file is imported when it is used."""

from __future__ import annotations

import importlib
from pathlib import Path

import click

from carma.cli.option_types import names, whole
from carma.cli.verb import Verb

# As in gpumemnet/dataset/config.py, which is imported only when it is used.
FAMILIES = ("mlp", "cnn", "transformer")
# In files of their own, <verb>.py; one line of help each, so that none is imported to be listed.
OTHERS = {
    "collect": "Run configs on a GPU and record what they take.",
    "pack": "Make the data set's files of collected rows.",
    "describe": "What is in the data set: counts, coverage, pictures.",
}


class Datasets(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), *OTHERS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in OTHERS:
            return super().get_command(ctx, cmd_name)
        command = importlib.import_module(f"gpumemnet.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        own = [(name, command.get_short_help_str(80)) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl([*own, *OTHERS.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        formatter.write_paragraph()
        formatter.write("Examples:\n  carma dataset generate --count 3000 --out configs.jsonl\n")


@click.group("dataset", cls=Datasets)
def command() -> None:
    """Make and look at the data that estimators learn from."""


@command.command(
    "generate",
    cls=Verb,
    examples=(
        "carma dataset generate --count 3000 --seed 1 --out configs.jsonl\n"
        "carma dataset generate --families cnn,mlp --count 10 --ranges mine.toml"
    ),
)
@click.option("--families", type=names(FAMILIES), default=FAMILIES, help="Not all of mlp, cnn, transformer, but these.")
@click.option("--count", type=whole(1, 1_000_000), default=3_000, help="So many of each family (3000).")
@click.option("--seed", type=whole(0), default=0, help="The same seed gives the same bytes (0).")
@click.option("--ranges", metavar="FILE", help="TOML: what is drawn from, where it differs from the defaults.")
@click.option(
    "--out", metavar="FILE", default="configs.jsonl", help="One config a line (configs.jsonl); - for standard output."
)
@click.option("--force", is_flag=True, help="Write over a file that holds other configs.")
def generate(families: tuple[str, ...], count: int, seed: int, ranges: str | None, out: str, force: bool) -> int:
    """Draw training runs by chance, one line of JSON each.

    Footprints, batches, depths and widths are spread over their ranges. Needs neither torch nor a GPU. A file that is
    there may be made again or longer; one with configs of another seed or other ranges is kept.
    """
    from carma.cli.error_output import note
    from gpumemnet.dataset.config import FAMILIES
    from gpumemnet.dataset.ranges import load_ranges
    from gpumemnet.dataset.recipe import Recipe, write_recipe

    chosen = tuple(family for family in FAMILIES if family in families)
    loaded = load_ranges(Path(ranges) if ranges else None)
    written = write_recipe(Recipe(families=chosen, count=count, seed=seed, ranges=loaded), Path(out), force)
    if out in ("-", "/dev/stdout"):  # it has the configs
        note(f"{written.configs:,} configs")
    else:
        click.echo(f"{written.configs:,} configs in {out}")
    for family, missed in written.missed.items():
        if missed:
            far = "not within a factor of 1.4 of the footprint that they were drawn for"
            note(f"{missed:,} of {count:,} {family} configs are {far}: nothing nearer was found in the ranges")
    return 0
