"""The `carma` command: the names of all verbs, and their import on demand.

This module imports click only, so that `carma --help` takes less than 100 ms. Each verb has a file of its own.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import click

from carma import __version__


class Entry(NamedTuple):
    section: str
    help: str


VERBS: dict[str, Entry] = {
    "submit": Entry("Tasks", "Queue a command, a script or a task file."),
    "run": Entry("Tasks", "Submit a command, follow its output, return its exit code."),
    "wait": Entry("Tasks", "Wait for the end of tasks; return their exit code."),
    "cancel": Entry("Tasks", "Stop running tasks; remove waiting tasks from the queue."),
    "hold": Entry("Tasks", "Prevent waiting tasks from starting."),
    "release": Entry("Tasks", "Allow held tasks to start."),
    "preempt": Entry("Tasks", "Ask running tasks to save a checkpoint and return to the queue."),
    "pause": Entry("Tasks", "Stop the processes of running tasks without ending them."),
    "unpause": Entry("Tasks", "Let paused tasks continue."),
    "retry": Entry("Tasks", "Queue finished tasks again."),
    "update": Entry("Tasks", "Change waiting tasks."),
    "estimate": Entry("Tasks", "Estimate the GPU memory of a command, without a GPU."),
    "top": Entry("Information", "GPUs and tasks, live, in the terminal."),
    "queue": Entry("Information", "Waiting and running tasks (alias: ls)."),
    "show": Entry("Information", "Details of one task."),
    "logs": Entry("Information", "Output of a task; -f follows it."),
    "explain": Entry("Information", "Scheduling decision for a task, GPU by GPU."),
    "gpus": Entry("Information", "GPUs with their tasks, memory, activity and state (alias: info)."),
    "users": Entry("Information", "GPU use, quotas and shares of users."),
    "history": Entry("Information", "Finished tasks."),
    "report": Entry("Information", "Use of the server over a period, by user and by GPU."),
    "events": Entry("Information", "Events of the daemon as they happen."),
    "up": Entry("Server", "Start the daemon."),
    "down": Entry("Server", "Stop the daemon; running tasks continue."),
    "drain": Entry("Server", "Start no new tasks on a GPU or on the whole server."),
    "resume": Entry("Server", "Accept new tasks again."),
    "config": Entry("Server", "Print or check the settings."),
    "doctor": Entry("Server", "Check this machine and the daemon."),
    "calibrate": Entry("Server", "Measure the GPU memory of CUDA libraries, for estimates."),
    "demo": Entry("More", "Compare exclusive and shared GPUs on virtual GPUs."),
    "completion": Entry("More", "Print the completion script for a shell."),
    "version": Entry("More", "Print the version."),
}
# Verbs of the other distributions of this repository, with the directory of the distribution.
OPTIONAL: dict[str, tuple[str, Entry]] = {
    "simulate": ("lab", Entry("Research", "Replay a trace on simulated GPUs, under one or more policies.")),
    "compare": ("lab", Entry("Research", "Compare simulated or real runs with the first of them.")),
    "run-report": ("lab", Entry("Research", "Tables, plots and an HTML page of a simulated or real run.")),
    "trace": ("lab", Entry("Research", "Describe, cut, scale or generate traces.")),
    "bench": ("lab", Entry("Research", "Measure the daemon, GPUs, memory estimates and policies.")),
    "dataset": ("gpumemnet", Entry("Research", "Collect and describe training data for memory estimators.")),
    "train": ("gpumemnet", Entry("Research", "Train the learned memory estimators.")),
}
ALIASES = {"add": "submit", "ls": "queue", "info": "gpus"}
START = """\
First steps:
  carma demo                        compare exclusive and shared GPUs, on virtual GPUs
  carma up --detach                 start the daemon on this machine's GPUs
  carma submit -- python train.py   queue a command; `carma queue` lists it
"""


def _installed() -> Mapping[str, object]:
    """The verbs of other distributions. A built-in verb cannot be replaced."""
    from carma.plugins import COMMANDS, load

    return load(COMMANDS)


class Verbs(click.Group):
    """Imports a verb when it is used, and turns every error into a message and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return [*VERBS, *_installed()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        name = ALIASES.get(cmd_name, cmd_name)
        if name in VERBS:
            command = importlib.import_module(f"carma.cli.{name}").command
        elif name in (installed := _installed()):
            command = installed[name]
        elif name in OPTIONAL:
            from carma.plugins import not_installed

            raise not_installed(f"carma {name}", OPTIONAL[name][0])
        else:
            return None
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            import difflib

            near = difflib.get_close_matches(args[0], [*VERBS, *ALIASES, *_installed()], n=1)
            question = f"did you mean `carma {near[0]}`? " if near else ""
            raise click.UsageError(f"unknown verb {args[0]!r}; {question}`carma --help` lists all verbs", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        entries = dict(VERBS)
        for name in _installed():
            entries[name] = OPTIONAL[name][1] if name in OPTIONAL else Entry("Plugins", "")
        for section in dict.fromkeys(entry.section for entry in entries.values()):
            with formatter.section(section):
                formatter.write_dl([(name, entry.help) for name, entry in entries.items() if entry.section == section])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        formatter.write_paragraph()
        formatter.write(START)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        """Verb names from the table: completion imports no verb."""
        from click.shell_completion import CompletionItem

        helps = {name: entry.help for name, entry in VERBS.items()} | dict.fromkeys(_installed(), "")
        names = [CompletionItem(name, help=text) for name, text in helps.items() if name.startswith(incomplete)]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]

    def main(self, *args: Any, **given: Any) -> Any:
        from carma.cli.error_output import guarded

        standalone = given.pop("standalone_mode", True)
        given.setdefault("prog_name", "carma")
        run: Callable[..., Any] = super().main
        code = guarded(lambda: run(*args, standalone_mode=False, **given))
        if standalone:
            sys.exit(code)
        return code


@click.group(
    cls=Verbs,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, message="carma %(version)s", help="Print the version.")
@click.pass_context
def carma(ctx: click.Context) -> None:
    """Share the GPUs of a server safely between deep-learning tasks.

    `carma VERB --help` lists the options of a verb, with examples.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(args: Iterable[str] | None = None) -> int:
    """Runs one verb and returns its exit code."""
    code = carma.main(None if args is None else list(args), standalone_mode=False)
    return int(code or 0)
