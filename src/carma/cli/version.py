"""`carma version`: print the version."""

from __future__ import annotations

import click

from carma import __version__
from carma.cli.verb import verb


@verb("version", examples="carma version\ncarma --version")
def command() -> None:
    """Print the version of this command."""
    click.echo(f"carma {__version__}")
