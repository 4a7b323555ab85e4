"""`carma completion`: print the completion script for a shell."""

from __future__ import annotations

import click
from click.shell_completion import ShellComplete, get_completion_class

from carma.cli.verb import verb

EXAMPLES = """
carma completion bash > ~/.local/share/bash-completion/completions/carma
carma completion zsh  > ~/.zfunc/_carma
carma completion fish > ~/.config/fish/completions/carma.fish
"""


@verb("completion", examples=EXAMPLES)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the completion script for a shell."""
    from carma.cli import carma

    kind = get_completion_class(shell)
    assert kind is not None
    # The base class does not check the version of the local bash: the script may be for another machine.
    click.echo(ShellComplete.source(kind(carma, {}, "carma", "_CARMA_COMPLETE")))
