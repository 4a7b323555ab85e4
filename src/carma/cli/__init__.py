"""The `carma` command: a group that knows every verb's name and one line of help without importing it.

`carma --help` must answer at once, so nothing but click is imported here; a verb's file is imported when it is used.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import click

from carma import __version__


class Entry(NamedTuple):
    section: str
    help: str


VERBS: dict[str, Entry] = {
    "submit": Entry("Tasks", "Queue a command, a script or a task file."),
    "run": Entry("Tasks", "Submit, follow the output, return the task's exit code."),
    "wait": Entry("Tasks", "Wait until tasks have ended; return their exit code."),
    "cancel": Entry("Tasks", "Stop tasks, or take them out of the queue."),
    "hold": Entry("Tasks", "Keep waiting tasks from starting."),
    "release": Entry("Tasks", "Let held tasks start."),
    "preempt": Entry("Tasks", "Ask running tasks to save and come back."),
    "retry": Entry("Tasks", "Queue finished tasks again."),
    "update": Entry("Tasks", "Change a waiting task."),
    "estimate": Entry("Tasks", "How much GPU memory a command will take; runs nothing on a GPU."),
    "queue": Entry("Looking", "Tasks that wait or run (alias: ls)."),
    "show": Entry("Looking", "Everything about one task."),
    "logs": Entry("Looking", "A task's output; -f follows it."),
    "explain": Entry("Looking", "Why a task is where it is, GPU by GPU."),
    "gpus": Entry("Looking", "The GPUs, what they do and who is on them (alias: info)."),
    "users": Entry("Looking", "What users had of the GPUs, have now, and may have."),
    "history": Entry("Looking", "Tasks that have ended."),
    "report": Entry("Looking", "What the server did over a period, by user and by GPU."),
    "events": Entry("Looking", "What happens, as it happens."),
    "up": Entry("Server", "Start the daemon."),
    "down": Entry("Server", "End the daemon; running tasks go on."),
    "drain": Entry("Server", "No new tasks on a GPU or on the whole server."),
    "resume": Entry("Server", "Take new tasks again."),
    "config": Entry("Server", "Show or check the settings."),
    "doctor": Entry("Server", "Check this machine and the daemon."),
    "calibrate": Entry("Server", "Measure what libraries take on this machine's GPU, for estimates."),
    "demo": Entry("More", "See it work on virtual GPUs; needs no GPU."),
    "completion": Entry("More", "Print the completion script of a shell."),
    "version": Entry("More", "Print the version."),
}
# Verbs of the other distributions of this repository: help, and what to install where one is missing.
OPTIONAL: dict[str, tuple[str, Entry]] = {
    "simulate": ("lab", Entry("Research", "Run a trace on simulated GPUs, policies side by side.")),
    "compare": ("lab", Entry("Research", "Compare runs, simulated or real, with the first as 1.")),
    "run-report": ("lab", Entry("Research", "Tables, plots and a page of one run, simulated or real.")),
    "trace": ("lab", Entry("Research", "Describe, cut and scale traces, or make new ones.")),
    "bench": ("lab", Entry("Research", "Measure the daemon, GPUs, memory estimates and policies.")),
    "dataset": ("gpumemnet", Entry("Research", "Make and describe the data that estimators learn from.")),
    "train": ("gpumemnet", Entry("Research", "Train the learned memory estimators from measured runs.")),
}
ALIASES = {"add": "submit", "ls": "queue", "info": "gpus"}
START = """\
Start here:
  carma demo                        see it work, on virtual GPUs
  carma up --detach                 start the daemon on this machine's GPUs
  carma submit -- python train.py   queue a command; carma queue shows it
"""


def _installed() -> Mapping[str, object]:
    """The verbs of other distributions. A built-in verb cannot be replaced."""
    from carma.plugins import COMMANDS, load

    return load(COMMANDS)


class Verbs(click.Group):
    """Imports a verb when it is asked for, and turns every error into one line and an exit code."""

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
            wanted = f"did you mean `carma {near[0]}`? " if near else ""
            raise click.UsageError(f"there is no verb {args[0]!r}; {wanted}`carma --help` lists them all", ctx)
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
        """Verb names come from the table, so that a press of the tab key imports nothing."""
        from click.shell_completion import CompletionItem

        helps = {name: entry.help for name, entry in VERBS.items()} | dict.fromkeys(_installed(), "")
        names = [CompletionItem(name, help=text) for name, text in helps.items() if name.startswith(incomplete)]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        from carma.cli.error_output import guarded

        def call() -> Any:
            return super(Verbs, self).main(args, prog_name or "carma", complete_var, standalone_mode=False, **extra)

        code = guarded(call)
        if standalone_mode:
            sys.exit(code)
        return code


def _print_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(f"carma {__version__}")
        ctx.exit()


@click.group(
    cls=Verbs,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print it.")
@click.pass_context
def carma(ctx: click.Context) -> None:
    """Lets deep-learning tasks share the GPUs of a server safely.

    `carma VERB --help` has the flags and an example of each verb.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(args: Iterable[str] | None = None) -> int:
    """The entry point: runs one verb and returns its exit code."""
    code = carma.main(None if args is None else list(args), standalone_mode=False)
    return int(code or 0)
