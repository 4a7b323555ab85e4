"""The flags of `submit` and `run`: one list for the command line, `#CARMA` lines and task files.

Every default is None, so that "not given" can be told from a value: the command line beats a file's flags.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from carma.cli import parsers as parse
from carma.cli.verb import Verb, whole
from carma.core.model.units import parse_duration_s, parse_mib

Function = TypeVar("Function", bound=Callable[..., Any])
AFTER_DASHES = "carma.after_dashes"


class Parsed(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """A flag whose value one of the parse functions reads."""

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self.name = name
        self.read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self.read(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class SubmitVerb(Verb):
    """Keeps everything after `--` as it is: no flag of ours is looked for in it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            place = args.index("--")
            ctx.meta[AFTER_DASHES] = tuple(args[place + 1 :])
            args = args[:place]
        return super().parse_args(ctx, args)


def _export(text: str) -> str:
    parse.parse_export(text, {})
    return text


def _begin(text: str) -> str:
    parse.parse_begin(text)
    return text  # it is read once more, by the daemon's clock


def filled(name: str) -> Parsed:
    return Parsed(name, parse.parse_text)


OPTIONS: tuple[tuple[tuple[str, ...], Any, str], ...] = (
    (("-G", "--gpus"), Parsed("N", parse.parse_gpus), "GPUs, each a different one (1)."),
    (("--gpu-mem",), Parsed("SIZE", parse_mib), "Memory it takes on each GPU: 12GiB, 512M; a bare number is MiB."),
    (("--gres",), Parsed("gpu:N", parse.parse_gres), "Slurm's spelling of --gpus."),
    (("-t", "--time"), Parsed("TIME", parse_duration_s), "Time limit: minutes, HH:MM:SS, D-HH:MM:SS, 90s, 2h."),
    (("-J", "--job-name", "--name", "name"), filled("NAME"), "A name to find it by."),
    (("-D", "--chdir"), filled("DIR"), "Run it there (here)."),
    (
        ("-o", "--output"),
        filled("FILE"),
        "Write stdout there; %j id, %A array, %a index, %x name, %t try, %u user.",
    ),
    (("-e", "--error"), filled("FILE"), "Write stderr there."),
    (("-d", "--dependency"), Parsed("WHEN:ID", parse.parse_dependencies), "afterok:12, afterany:12:13, afternotok:12."),
    (("-a", "--array"), Parsed("LIST", parse.parse_array), "One task an index: 0-9, 1,3,5, 0-9%3 (three at once)."),
    (("--begin",), Parsed("TIME", _begin), "Not before: now+1hour, 16:30, 2026-01-31T16:30."),
    (("--priority",), whole(-10_000, 10_000), "Larger goes first (0)."),
    (("--nice",), whole(-10_000, 10_000), "Slurm's spelling: the priority, negated."),
    (("--signal",), Parsed("SIG@S", parse.parse_warning), "That signal S seconds before the time limit: USR1@60."),
    (("--checkpoint-signal",), Parsed("SIG", parse.parse_save_signal), "On that signal it saves and ends: USR1."),
    (("--checkpoint-grace",), Parsed("TIME", parse.parse_grace), "So long it has for that (120 s)."),
    (("--grace",), Parsed("TIME", parse.parse_grace), "Between SIGTERM and SIGKILL when it is stopped."),
    (("--max-oom-retries",), whole(0, 100), "So often it comes back after running out of GPU memory."),
    (("--mechanism",), click.Choice(("mps", "timeslice")), "How it shares GPUs; the server's way if not given."),
    (("--threads-percent",), whole(1, 100), "At most so much of each GPU's SMs, under MPS (100)."),
    (("--export",), Parsed("VARS", _export), "Environment to keep: ALL (default), NONE, NAME, NAME=value."),
    (("--comment",), Parsed("TEXT", str), "A remark, shown by `carma show`."),
)
SWITCHES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("--exclusive",), "Nobody else on its GPUs."),
    (("--requeue/--no-requeue",), "Whether it comes back after running out of GPU memory."),
    (("-H", "--hold"), "Submit it held; `carma release` lets it start."),
    (("--nonblock", "--immediate"), "Refuse (exit 75) instead of waiting when nothing is free."),
    (("--dry-run", "--test-only"), "Say what would happen; do nothing."),
)
IGNORED: dict[str, tuple[tuple[str, ...], str]] = {
    "mem": (("--mem",), "is host memory, which is not limited; GPU memory is --gpu-mem"),
    "cpus_per_task": (("-c", "--cpus-per-task"), "has no effect; CPUs are not scheduled"),
    "partition": (("-p", "--partition"), "has no effect; there is one queue"),
    "account": (("-A", "--account"), "has no effect"),
    "qos": (("-q", "--qos"), "has no effect"),
    "ntasks": (("-n", "--ntasks"), "has no effect; a task is one command"),
    "nodes": (("-N", "--nodes"), "has no effect; there is one node"),
    "mail_type": (("--mail-type",), "has no effect; no mail is sent"),
    "mail_user": (("--mail-user",), "has no effect; no mail is sent"),
}
MANY: tuple[tuple[tuple[str, ...], dict[str, Any], str], ...] = (
    (("--file",), {"type": click.Path(), "metavar": "FILE"}, "A task file: .toml, or the published .rad."),
    (("--wrap",), {"metavar": "TEXT"}, "Run TEXT with sh -c; the only way to a shell."),
    (("--stdin",), {"is_flag": True, "default": None}, "One command a line on standard input."),
    (
        ("--param",),
        {"multiple": True, "metavar": "K=V,V"},
        "One task a value, {K} in the command filled in; repeat it.",
    ),
)


def submit_flags(function: Function) -> Function:
    """All of them on a verb, in the order in which help lists them."""
    function = click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[--] COMMAND...")(function)
    for ignored, _why in reversed(IGNORED.values()):
        function = click.option(*ignored, default=None, hidden=True)(function)
    for spelled, extra, text in reversed(MANY):
        function = click.option(*spelled, help=text, **extra)(function)
    for names, text in reversed(SWITCHES):
        function = click.option(*names, is_flag=True, default=None, help=text)(function)
    for names, kind, text in reversed(OPTIONS):
        function = click.option(*names, type=kind, default=None, help=text)(function)
    return function
