"""`carma bench`: the experiments of carma.bench."""

from __future__ import annotations

from typing import Any

import click

from carma.cli.verb import Verb, whole


class Benches(click.Group):
    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        formatter.write_paragraph()
        formatter.write("Examples:\n  carma bench daemon --quick\n  carma bench collocation\n")


class Percentages(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """`25,50,75`."""

    name = "percent"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        words = [word.strip() for word in str(value).split(",") if word.strip()]
        if not all(word.isascii() and word.isdigit() and 0 < int(word) < 100 for word in words):
            self.fail(f"{str(value)!r} is not a list of whole numbers between 1 and 99, as in 25,50,75", param, ctx)
        return tuple(dict.fromkeys(int(word) for word in words))


@click.group("bench", cls=Benches)
def command() -> None:
    """Measure. Figures only: nothing passes or fails."""


@command.command("daemon", cls=Verb, examples="carma bench daemon --quick\ncarma bench daemon --json figures.json")
@click.option("--json", "json_file", metavar="FILE", help="Write the figures there; - for standard output.")
@click.option("--quick", is_flag=True, help="Fewer repeats.")
def daemon(json_file: str | None, quick: bool) -> int:
    """Submissions a second, latency, decision time, CPU at rest and at work."""
    from carma.bench import daemonbench

    return daemonbench.run(daemonbench.Options(json=json_file, quick=quick))


@command.command(
    "interference",
    cls=Verb,
    examples=(
        "carma bench interference\n"
        "carma bench interference --mechanism timeslice --pairs 50 --triples 0 --quadruples 0\n"
        "carma bench interference --percent 25,50,75 --pairs 0 --triples 0 --quadruples 0"
    ),
)
@click.option(
    "--mechanism", type=click.Choice(["mps", "timeslice"]), default="mps", help="How tasks share the GPU (mps)."
)
@click.option("--pairs", type=whole(0), default=70, help="How many groups of two (70).")
@click.option("--triples", type=whole(0), default=45, help="How many groups of three (45).")
@click.option("--quadruples", type=whole(0), default=35, help="How many groups of four (35).")
@click.option("--percent", type=Percentages(), default=(), help="Thread percentages of heavy tasks beside light ones.")
@click.option("--seed", type=whole(0), default=1, help="Which groups are drawn (1).")
@click.option("--seconds", type=click.FloatRange(0.2, 600), default=1.6, help="Measured span of a group (1.6).")
@click.option("--gpu", metavar="GPU", help="Index or UUID; the first one otherwise.")
@click.option("--limit", "limit_s", type=click.FloatRange(1), default=900.0, help="Seconds for all of it (900).")
@click.option("--json", metavar="FILE", default="interference.json", help="The table (interference.json).")
def interference(**flags: Any) -> int:
    """How training tasks slow each other down: each alone, and in groups. Wants a GPU for itself, and torch."""
    from carma.bench.gpu import interference as study

    return study.run(study.Options(**flags))


@command.command(
    "collocation",
    cls=Verb,
    examples="carma bench collocation\ncarma bench collocation --redraw results/h200/collocation.json",
)
@click.option("--copies", type=whole(1, 64), default=8, help="From one to so many at the same time (8).")
@click.option("--task", type=click.Choice(["small", "large"]), multiple=True, help="One of the two tasks only.")
@click.option(
    "--mechanism",
    type=click.Choice(["timeslice", "mps", "mig"]),
    multiple=True,
    help="Not all that are here, but this.",
)
@click.option("--seconds", type=click.FloatRange(0.2, 600), default=4.0, help="Measured span of a point (4).")
@click.option("--gpu", metavar="GPU", help="Index or UUID; the first one otherwise.")
@click.option("--limit", "limit_s", type=click.FloatRange(1), default=900.0, help="Seconds for all of it (900).")
@click.option("--json", metavar="FILE", default="collocation.json", help="The figures (collocation.json).")
@click.option("--plot", metavar="FILE", help="The picture; beside the figures otherwise, as PNG.")
@click.option("--redraw", metavar="FILE", help="Table and picture of an earlier run; measure nothing.")
def collocation(**flags: Any) -> int:
    """1 to 8 copies of a small and of a large training task on one GPU. Wants a GPU for itself, and torch."""
    from carma.bench.gpu import collocation as study

    flags["task"] = flags["task"] or ("small", "large")
    return study.run(study.Options(**flags))
