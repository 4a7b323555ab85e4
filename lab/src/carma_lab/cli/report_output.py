"""What `carma run-report` and `carma compare` share: the options for their output, and writing it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

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
    from carma_lab.reports.drawing import Picture


class ReportOutput(NamedTuple):
    out: Path | None  # directory of pictures
    html: str | None
    force: bool
    as_json: bool

    def check(self, names: Iterable[str]) -> None:
        """Checks the options before anything is computed. `names`: names of the pictures that may be drawn."""
        check_page(self.html, self.force, self.as_json)
        if self.out is not None:
            from carma_lab.reports.drawing import files_of

            check_pictures(self.out, files_of(names), self.force)

    def write(
        self, found: object, pictures: Sequence[Picture], page: Callable[[], str], show: Callable[[], None]
    ) -> None:
        """`show` prints the tables on the terminal: before the pictures, which need matplotlib."""
        if self.as_json:
            from carma.cli.output import print_json

            print_json(found)
        elif self.html != STDOUT:
            show()
        if self.out is not None:
            from carma_lab.reports.drawing import save

            for path in save(pictures, self.out):
                say_written(str(path))
        if self.html is not None:
            from carma_lab.reports.pages import write_text

            say_written(str(write_text(page(), self.html)))


def report_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options as one argument `output`."""

    @functools.wraps(function)
    def command(*, out: Path | None, html: str | None, force: bool, as_json: bool, **given: Any) -> Any:
        return function(output=ReportOutput(out, html, force, as_json), **given)

    command = click.option("--json", "as_json", is_flag=True, help="The figures as JSON.")(command)
    command = file_flag("--html", "File for one page with tables and pictures.")(force_flag(command))
    return folder_flag("Directory for the pictures, as PNG and SVG.")(command)
