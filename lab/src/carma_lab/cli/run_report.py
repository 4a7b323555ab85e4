"""`carma run-report`: tables, plots and a page of one run, simulated or real."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from carma.cli.option_types import since_at, since_flag
from carma.cli.verb import verb
from carma_lab.cli.progress_line import check_run_file
from carma_lab.cli.report_output import ReportOutput, report_flags
from gpumemnet.cli.output_file_option import file_flag, say_written

if TYPE_CHECKING:
    from carma_lab.runs.record import Run

EXAMPLES = """
carma simulate --trace t1 --policy magm --out run.json && carma run-report run.json
carma run-report run.json --out pictures --html run.html
carma run-report --since 7d --save week.json    the server's tasks as such a run
"""


@verb("run-report", examples=EXAMPLES)
@click.argument("run", type=click.Path(path_type=Path), required=False, metavar="[RUN]")
@since_flag("Start of the period: 24h (default), 7d, today, 2026-01-31.")
@file_flag("--save", "File for the server's tasks as a run.")
@click.option("--trace", metavar="NAME", help="Trace with the tasks' durations alone, by task name.")
@report_flags
def command(run: Path | None, since: str | None, save: str | None, trace: str | None, output: ReportOutput) -> None:
    """Figures of a run and their distributions: of RUN, or of the tasks of this server.

    RUN is a file of `carma simulate --out` or of --save. Without it, the run is what the daemon did since --since;
    the period begins on a full hour. docs/reports.md says how each figure is computed.
    """
    from carma_lab.reports.pictures import NAMES
    from carma_lab.runs.record import read

    output.check(NAMES)
    if run is not None:
        if since is not None or save is not None or trace is not None:
            raise click.UsageError(
                "--since, --save and --trace are for the tasks of a server, not for the file of a run"
            )
        return _report(read(run), output)
    if save is not None:
        check_run_file(save, output.force, simulated=False)
    _report(_of_server(since, trace, save), output)
    return say_written(save)


def _of_server(since: str | None, trace: str | None, save: str | None) -> Run:
    from carma.cli.connection import connect
    from carma.traces import find
    from carma_lab.runs.from_server import recorded
    from carma_lab.runs.record import write

    known = None if trace is None else find(trace)
    with connect() as client:
        made = recorded(client, since_at(client, since), known)
    if save is not None:
        write(made, save)
    return made


def _report(run: Run, output: ReportOutput) -> None:
    from carma_lab.cli.run_view import show
    from carma_lab.reports.pages import run_page
    from carma_lab.reports.pictures import pictures
    from carma_lab.reports.summary import summary

    found, drawn = summary(run), pictures(run)
    output.write(found, drawn, lambda: run_page(found, drawn), lambda: show(found, run.course))
