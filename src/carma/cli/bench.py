"""`carma bench`: the experiments of carma.bench."""

from __future__ import annotations

import click

from carma.cli.verb import Verb


class Benches(click.Group):
    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        formatter.write_paragraph()
        formatter.write("Examples:\n  carma bench daemon --quick\n")


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
