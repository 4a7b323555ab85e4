"""The options of `submit` and `run`: one list for the command line, `#CARMA` lines and task files.

Every default is None, so that a missing option differs from any value: the command line overrides the options of a
file.
"""

from __future__ import annotations

from typing import Any

import click

from carma.cli import parsers as parse
from carma.cli.error_output import note
from carma.cli.notify_options import parse_kinds
from carma.cli.option_types import GPU_MEMORY, TIME, Function, Parsed, non_empty, whole
from carma.cli.verb import command_words
from carma.core.model.units import parse_duration_s


def _export(text: str) -> str:
    parse.parse_export(text, {})
    return text


def _begin(text: str) -> str:
    parse.parse_begin(text)
    return text  # parsed again with the daemon's clock


def _gpus(text: str) -> int:
    count = parse.parse_gpus(text)
    _note_type(text.rpartition(":")[0])
    return count


def _gres(text: str) -> int:
    count = parse.parse_gres(text)
    _note_type(":".join(part for part in text.strip().split(":")[1:] if not part.isdigit()))
    return count


def _note_type(name: str) -> None:
    if name:
        note(f"the GPU type {name!r} has no effect: CARMA chooses among all GPUs of the server")


_FILE = non_empty("FILE")
_LIMIT = Parsed("TIME", parse_duration_s)
_WARNING = Parsed("SIG@S", parse.parse_warning)
_DEPENDENCY = Parsed("WHEN:ID", parse.parse_dependencies)
_SAVE_SIGNAL = Parsed("SIG", parse.parse_save_signal)
OPTIONS: tuple[tuple[str, Any, str], ...] = (
    ("-G --gpus", Parsed("N", _gpus), "Number of GPUs (default 1)."),
    ("--gpu-mem gpu_memory_mib", GPU_MEMORY, "Memory that the task needs on each GPU: 12GiB, 512M; plain: MiB."),
    ("--gres", Parsed("gpu:N", _gres), "Number of GPUs, in Slurm's form."),
    ("-t --time time_limit_s", _LIMIT, "Time limit: minutes, HH:MM:SS, D-HH:MM:SS, 90s, 2h."),
    ("-J --job-name --name name", non_empty("NAME"), "Name of the task (default: its program)."),
    ("-D --chdir", non_empty("DIR"), "Working directory (default: the current directory)."),
    ("-o --output", _FILE, "File for stdout; %j ID, %A array, %a index, %x name, %t attempt, %u user."),
    ("-e --error", _FILE, "File for stderr, with the same patterns."),
    ("-d --dependency after", _DEPENDENCY, "Start after other tasks: afterok:12, afterany:12:13, afternotok:12."),
    ("-a --array", Parsed("LIST", parse.parse_array), "One task for each index: 0-9, 1,3,5; 0-9%3: three at once."),
    ("--begin begin_at", Parsed("TIME", _begin), "Earliest start: now+1hour, 16:30, 2026-01-31T16:30."),
    ("--priority", whole(-10_000, 10_000), "Priority; higher starts first (default 0)."),
    ("--nice", whole(-10_000, 10_000), "Negative priority, as in Slurm."),
    ("--signal warn", _WARNING, "Signal to send S seconds before the time limit: USR1@60."),
    ("--checkpoint-signal", _SAVE_SIGNAL, "Signal on which the task saves a checkpoint and exits: USR1."),
    ("--checkpoint-grace", TIME, "Time that saving a checkpoint may take (default 120s)."),
    ("--grace grace_s", TIME, "Time between SIGTERM and SIGKILL (default: stopping.grace_s, 10s)."),
    ("--max-oom-retries", whole(0, 100), "Maximum number of retries after a GPU out-of-memory failure (default 4)."),
    ("--mechanism", click.Choice(("mps", "timeslice")), "How the task shares GPUs (default: sharing.mechanism)."),
    ("--threads-percent", whole(1, 100), "Limit on the SMs of each GPU under MPS, in percent (default 100)."),
    ("--export", Parsed("VARS", _export), "Environment variables: ALL (default), NONE, NAME, NAME=value."),
    (
        "--notify-on",
        Parsed("EVENTS", parse_kinds),
        "Events to notify of: finish,failure,oom,wait,idle (default),retry.",
    ),
    ("--comment", Parsed("TEXT", str), "Comment, shown by `carma show`."),
)
SWITCHES: tuple[tuple[str, str], ...] = (
    ("--exclusive", "Do not share the GPUs of this task."),
    ("--requeue/--no-requeue", "Retry after a GPU out-of-memory failure, or do not."),
    ("--progress/--no-progress", "Count the optimizer steps of a PyTorch task (default), or do not."),
    ("--pause/--no-pause", "Let CARMA pause the task for a slowed neighbour (default), or never."),
    ("-H --hold", "Submit the task held; `carma release` lets it start."),
    ("--nonblock --immediate", "Do not queue: exit with code 75 if no GPU is free now."),
    ("--dry-run --test-only", "Print the decision for the task; submit nothing."),
)
IGNORED: dict[str, tuple[tuple[str, ...], str]] = {
    "mem": (("--mem",), "has no effect: host memory is not limited; GPU memory is --gpu-mem"),
    "cpus_per_task": (("-c", "--cpus-per-task"), "has no effect: CPUs are not scheduled"),
    "partition": (("-p", "--partition"), "has no effect: there is one queue"),
    "account": (("-A", "--account"), "has no effect"),
    "qos": (("-q", "--qos"), "has no effect"),
    "ntasks": (("-n", "--ntasks"), "has no effect: a task is one command"),
    "nodes": (("-N", "--nodes"), "has no effect: there is one node"),
    "mail_type": (("--mail-type",), "has no effect: --notify mailto:ADDRESS sends mails"),
    "mail_user": (("--mail-user",), "has no effect: --notify mailto:ADDRESS sends mails"),
}
CARMA_ONLY = (  # long options that a training script is unlikely to have
    "--gpu-mem",
    "--gres",
    "--checkpoint-signal",
    "--checkpoint-grace",
    "--max-oom-retries",
    "--threads-percent",
    "--no-pause",
    "--no-requeue",
    "--nonblock",
)
REPEATED: tuple[tuple[str, dict[str, Any], str], ...] = (
    (
        "--notify",
        {"multiple": True, "metavar": "TARGET"},
        "Where to send notices: mailto:ADDRESS, a webhook, an Apprise URL or a command. Repeatable. `none`: nowhere.",
    ),
)
SOURCES: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("--file", {"type": click.Path(), "metavar": "FILE"}, "Task file (.toml or .rad) or script to submit."),
    ("--wrap", {"metavar": "TEXT"}, "Command line to run with `sh -c`."),
    ("--stdin", {"is_flag": True, "default": None}, "Read one command from each line of standard input."),
    ("--param", {"multiple": True, "metavar": "K=V,V"}, "One task for each value of {K} in the command; repeatable."),
)


def submit_flags(function: Function) -> Function:
    """Adds all options to a verb, in the order of its help."""
    function = command_words(function)
    for ignored, _why in reversed(IGNORED.values()):
        function = click.option(*ignored, default=None, hidden=True)(function)
    for names, extra, text in reversed((*SOURCES, *REPEATED)):
        function = click.option(*names.split(), help=text, **extra)(function)
    for names, text in reversed(SWITCHES):
        function = click.option(*names.split(), is_flag=True, default=None, help=text)(function)
    for names, kind, text in reversed(OPTIONS):
        function = click.option(*names.split(), type=kind, default=None, help=text)(function)
    return function
