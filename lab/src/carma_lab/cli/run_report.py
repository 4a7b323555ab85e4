"""`carma run-report`: tables, plots and a page of one run, simulated or real."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from carma.cli.option_types import since_at, since_flag
from carma.cli.verb import json_flag, verb
from carma_lab.cli.progress_line import check_run_file
from gpumemnet.cli.output_file_option import (
    STDOUT,
    check_page,
    check_pictures,
    file_flag,
    folder_flag,
    force_flag,
    say_written,
)

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
@folder_flag("Directory for the pictures, as PNG and SVG.")
@file_flag("--html", "File for one page with tables and pictures.")
@force_flag
@json_flag
def command(
    run: Path | None,
    since: str | None,
    save: str | None,
    trace: str | None,
    out: Path | None,
    html: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Figures of a run and their distributions: of RUN, or of the tasks of this server.

    RUN is a file of `carma simulate --out` or of --save. Without it, the run is what the daemon did since --since;
    the period begins on a full hour. docs/reports.md says how each figure is computed.
    """
    _check(out, html, force, as_json)
    if run is not None:
        if since is not None or save is not None or trace is not None:
            raise click.UsageError(
                "--since, --save and --trace are for the tasks of a server, not for the file of a run"
            )
        from carma_lab.runs.record import read

        return _run(read(run), out, html, as_json)
    if save is not None:
        check_run_file(save, force, simulated=False)
    _run(_of_server(since, trace, save), out, html, as_json)
    return say_written(save)


def _check(out: Path | None, html: str | None, force: bool, as_json: bool) -> None:
    check_page(html, force, as_json)
    if out is not None:
        from carma_lab.reports.drawing import files_of
        from carma_lab.reports.pictures import NAMES

        check_pictures(out, files_of(NAMES), force)


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


def _run(run: Run, out: Path | None, html: str | None, as_json: bool) -> None:
    from carma.cli.output import print_json
    from carma_lab.reports.summary import summary

    found = summary(run)
    written = []
    if out is not None:
        from carma_lab.reports.pictures import draw

        written += draw(run, out)
    if html is not None:
        from carma_lab.reports.html_page import write

        written.append(write(run, found, html))
    if as_json:
        print_json(found)
    elif html != STDOUT:
        from carma_lab.cli.run_tables import show

        show(found, run.course)
    for path in written:
        say_written(str(path))
