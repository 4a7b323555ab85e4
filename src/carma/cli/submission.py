"""From options, files and words to submit requests. A command is a list of words; no shell interprets it."""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import click

from carma.cli import parsers as parse
from carma.cli import rad_file, sweep, task_file
from carma.cli.connection import ask
from carma.cli.error_output import click_message, note
from carma.cli.notify_options import notify_of
from carma.cli.task_flags import CARMA_ONLY, IGNORED
from carma.cli.verb import AFTER_DASHES
from carma.client import Client
from carma.core.model.units import show_count
from carma.core.model.values import SaveSignal, TaskSpec
from carma.errors import BadTaskFile, NotRunnable, Usage
from carma.wire.api_types import ArrayAsk, SubmitRequest

Flags = dict[str, Any]
NOT_IN_FILES = ("file", "stdin", "parsable", "as_json", "wait", "help", "words")
EXAMPLE = "try: carma submit --gpu-mem 8GiB -- python train.py"
FILES = "name a task file (.toml or .rad) or a script that exists"
HELP = "`carma submit --help` lists the options"
FRAMEWORKS = ("torch", "tensorflow", "jax")
_PYTHON = re.compile(r"(.*/)?python[0-9.]*")


class Asked(NamedTuple):
    """What to submit: merged options, commands (one for each task) and variables from a task file."""

    flags: Flags
    commands: tuple[tuple[str, ...], ...]
    environment: dict[str, str]
    places: tuple[str, ...] = ()  # of the commands in a list
    name: str = ""  # of the task file or script, for tasks without a name


def requests(ctx: click.Context, flags: Flags, words: tuple[str, ...]) -> list[SubmitRequest]:
    """Everything is read and checked before the first task is submitted."""
    asked = _asked(ctx, flags, words)
    for key, (names, why) in IGNORED.items():
        if asked.flags.get(key) is not None:
            note(f"{names[-1]} {why}")
    params = sweep.read_params(asked.flags.get("param") or ())
    if "begin_at" in asked.flags:  # by the daemon's clock, which runs faster than real time for virtual GPUs
        now = ask(Client.server).now
        asked.flags["begin_at"] = parse.parse_begin(asked.flags["begin_at"], now)
        if asked.flags["begin_at"] < now:
            note("the time of --begin has passed, so it delays nothing")
    asked.flags["notify"] = notify_of(asked.flags)
    made = []
    for place, command in enumerate(asked.commands):
        for filled, chosen in sweep.combinations(command, params) if params else [(command, {})]:
            request = _request(asked, filled, chosen)
            if asked.places:
                _check_runnable(request.spec, asked.places[place])
            made.append(request)
    return made


def note_mistakes(made: list[SubmitRequest]) -> None:
    """What is probably wrong with accepted tasks. A script may be written before its task starts."""
    for script in dict.fromkeys(missing for request in made if (missing := _missing_script(request.spec))):
        note(f"there is no file {script} now; the task fails unless it exists when the task starts")
    for python in dict.fromkeys(own for request in made if (own := _own_python(request.spec))):
        hint = "activate the environment of your script before you submit, or write the full path of its Python"
        note(f"{python} is CARMA's own Python, which has no torch, tensorflow or jax: {hint}")


def _own_python(spec: TaskSpec) -> str:
    """The program if it is the Python of CARMA's environment, without a framework; otherwise an empty text."""
    program = os.path.join(spec.directory, spec.command[0]) if "/" in spec.command[0] else spec.command[0]
    is_ours = spec.command[1:2] == ("-m",) and "".join(spec.command[2:3]).partition(".")[0] == "carma"
    if is_ours or not _PYTHON.fullmatch(program) or any(map(find_spec, FRAMEWORKS)):
        return ""
    found = shutil.which(program, path=spec.environment.get("PATH"))
    own = os.path.realpath(os.path.dirname(sys.executable))
    return found if found and os.path.realpath(os.path.dirname(found)) == own else ""


def _missing_script(spec: TaskSpec) -> str:
    """The script of `python SCRIPT.py` if it does not exist; otherwise an empty text."""
    program, *rest = spec.command
    if not _PYTHON.fullmatch(program):
        return ""
    words = iter(rest)
    for word in words:
        if word in ("-m", "-c", "-"):
            return ""
        if word in ("-W", "-X"):
            next(words, "")
        elif not word.startswith("-"):
            exists = os.path.lexists(os.path.join(spec.directory, word))
            return word if word.endswith(".py") and not exists else ""
    return ""


def _check_runnable(spec: TaskSpec, place: str) -> None:
    """The daemon's check of a command, for all commands of a list before the first is submitted."""
    from carma.daemon.probes.command_check import check_runnable

    try:
        check_runnable(spec)
    except NotRunnable as error:
        hint = "; ".join(part for part in ("nothing was submitted", error.hint) if part)
        raise NotRunnable(f"{place}: {error}", hint) from None


def _given(flags: Flags) -> Flags:
    return {key: value for key, value in flags.items() if value is not None and value != ()}


def _asked(ctx: click.Context, flags: Flags, words: tuple[str, ...]) -> Asked:
    given = _given(flags)
    after: tuple[str, ...] | None = ctx.meta.get(AFTER_DASHES)
    if words and after is not None:
        words, after = (*words, "--", *after), None  # the command's own "--"
    sources = [bool(words or after), "file" in given, "wrap" in given, "stdin" in given]
    if sum(sources) == 0:
        raise Usage("no command was given", EXAMPLE)
    if sum(sources) > 1:
        raise Usage("a command, --file, --wrap and --stdin exclude one another", EXAMPLE)
    if "stdin" in given:
        lines = sweep.read_commands(sys.stdin)
        return Asked(given, tuple(lines.values()), {}, tuple(f"standard input, line {number}" for number in lines))
    if "wrap" in given:
        if not given["wrap"].strip():
            raise Usage("the command line of --wrap is empty", EXAMPLE)
        return Asked(given, (("/bin/sh", "-c", given["wrap"]),), {})
    if after:
        return Asked(given, (after,), {})
    _note_misplaced(words)
    return _from_words(ctx, given, words)


def _note_misplaced(words: tuple[str, ...]) -> None:
    """Options of CARMA after the program are arguments of the program; `--` before it says that this is meant."""
    for word in words[1:]:
        if (option := word.partition("=")[0]) in CARMA_ONLY:
            note(f"{option} follows {words[0]}, so it is its argument; options of CARMA precede the command")


def _from_words(ctx: click.Context, given: Flags, words: tuple[str, ...]) -> Asked:
    """A task file or a script, otherwise a command."""
    path = Path(given["file"] if "file" in given else words[0])
    is_named = "file" in given or path.suffix in (".rad", ".toml", ".sh")
    if is_named and not path.is_file() and shutil.which(str(path)) is None:
        kind = "is a directory" if path.is_dir() else "is not a regular file" if os.path.lexists(path) else ""
        raise BadTaskFile(f"{path} {kind}, so it is not a task file" if kind else f"there is no file {path}", FILES)
    if path.suffix == ".rad":
        return _from_rad(given, path)
    if path.suffix == ".toml":
        return _from_toml(ctx, given, path)
    if "file" in given or task_file.is_script(path):
        flags = _from_directives(ctx, path)
        return Asked({**flags, **given}, (task_file.script_command(path, words[1:]),), {}, name=path.stem)
    return Asked(given, (words,), {})


def _from_rad(given: Flags, path: Path) -> Asked:
    task = rad_file.read_rad(path)
    flags = _given({"gpus": task.gpus, "exclusive": task.exclusive or None, "gpu_memory_mib": task.memory_mib})
    if task.memory_mib is None:
        note(f"{path} has no measured memory (line 8): CARMA estimates it")
    return Asked({**flags, **given}, (rad_file.in_environment(task),), {}, name=path.stem)


def _from_toml(ctx: click.Context, given: Flags, path: Path) -> Asked:
    names = [
        option.removeprefix("--")
        for param in ctx.command.params
        if param.name not in NOT_IN_FILES
        for option in (*param.opts, *param.secondary_opts)
        if option.startswith("--")
    ]
    read = task_file.read_task_file(path, names)
    if not read.command:
        raise BadTaskFile(f"{path} has no command", 'add for example: command = ["python", "train.py"]')
    flags = _parsed(ctx, read.words, str(path))
    return Asked({**flags, **given}, (read.command,), read.environment, name=path.stem)


def _from_directives(ctx: click.Context, path: Path) -> Flags:
    """The options in `#CARMA` and `#SBATCH` lines. Unknown Slurm options are skipped. A script with `#SBATCH` lines
    gets variables of Slurm."""
    flags: Flags = {}
    skipped: list[str] = []
    for directive in task_file.read_directives(path):
        where = f"{path}, line {directive.line} (#{directive.dialect})"
        if directive.dialect == "SBATCH":
            flags["slurm"] = {}
        try:
            flags.update(_parsed(ctx, directive.words, where))
        except _UnknownFlag as unknown:
            if directive.dialect == "CARMA":
                raise
            skipped.append(unknown.flag)
    if skipped:
        note(f"{path}: skipped the #SBATCH lines with {', '.join(skipped)}")
    return flags


class _UnknownFlag(BadTaskFile):
    flag = ""


def _parsed(ctx: click.Context, words: tuple[str, ...], where: str) -> Flags:
    """The options of a file, read by the parser of the command line."""
    try:
        inner = ctx.command.make_context(ctx.info_name, list(words))
    except click.NoSuchOption as error:
        unknown = _UnknownFlag(f"{where}: {click_message(error)}", HELP)
        unknown.flag = error.option_name
        raise unknown from None
    except click.UsageError as error:
        raise BadTaskFile(f"{where}: {click_message(error)}", HELP) from None
    except click.exceptions.Exit:
        raise BadTaskFile(f"{where}: only options are allowed here", HELP) from None
    with inner:
        if inner.params.get("words") or AFTER_DASHES in inner.meta:
            raise BadTaskFile(f"{where}: only options are allowed here", "remove the words that are no options")
        return {key: value for key, value in _given(inner.params).items() if key not in NOT_IN_FILES}


def _request(asked: Asked, command: tuple[str, ...], chosen: dict[str, str]) -> SubmitRequest:
    flags = asked.flags
    array = flags.get("array")
    return SubmitRequest(
        spec=_spec(asked, command, chosen),
        array=ArrayAsk(array.indices, array.at_once) if array else None,
        held=bool(flags.get("hold")),
        nonblock=bool(flags.get("nonblock")),
        dry_run=bool(flags.get("dry_run")),
    )


def _check_combination(flags: Flags) -> None:
    if "warn" in flags and "time_limit_s" not in flags:
        raise Usage("--signal needs --time: the signal precedes the time limit", "add for example --time 02:00:00")
    if "threads_percent" in flags and flags.get("mechanism") == "timeslice":
        raise Usage("--threads-percent needs MPS and excludes --mechanism timeslice", "leave out one of them")
    if "checkpoint_grace" in flags and "checkpoint_signal" not in flags:
        raise Usage("--checkpoint-grace needs --checkpoint-signal", "add for example --checkpoint-signal USR1")


def _spec(asked: Asked, command: tuple[str, ...], chosen: dict[str, str]) -> TaskSpec:
    flags = asked.flags
    _check_combination(flags)
    fields = {name: flags[name] for name in TaskSpec.__struct_fields__ if name in flags and name != "array"}
    for name in ("name", "output", "error"):
        if name in fields:
            fields[name] = sweep.fill(fields[name], chosen)
    fields.setdefault("name", sweep.task_name(asked.name, chosen))
    if flags.get("requeue") is False:
        fields.setdefault("max_oom_retries", 0)
    if "checkpoint_signal" in flags:
        grace = (flags["checkpoint_grace"],) if "checkpoint_grace" in flags else ()
        fields["checkpoint"] = SaveSignal(flags["checkpoint_signal"], *grace)
    if "slurm" in flags and "cpus_per_task" in flags:
        fields["slurm"] = {"SLURM_CPUS_PER_TASK": flags["cpus_per_task"]}
    fields.setdefault("gpus", flags.get("gres", 1))
    fields.setdefault("priority", -flags.get("nice", 0))
    return TaskSpec(
        command=_checked(command),
        directory=_directory(flags.get("chdir")),
        environment=_environment(flags.get("export"), asked.environment),
        umask=_umask(),
        **fields,
    )


def _checked(command: tuple[str, ...]) -> tuple[str, ...]:
    for place, word in enumerate(command, start=1):
        if "\0" in word:
            raise Usage(f"word {place} of the command contains a NUL character, which no program accepts")
        if not _is_text(word):
            raise Usage(f"word {place} of the command is not UTF-8 text", "rename the file, or wrap it in a script")
    if not command[0]:
        raise Usage("the first word of the command is empty", EXAMPLE)
    return command


def _is_text(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def _directory(chdir: str | None) -> str:
    try:
        here = os.getcwd()
    except FileNotFoundError:
        hint = "change to another directory, or give --chdir DIR"
        raise NotRunnable("the current directory no longer exists", hint) from None
    path = os.path.abspath(os.path.join(here, os.path.expanduser(chdir))) if chdir else here
    if "\0" in path or not _is_text(path) or not _is_directory(path):
        raise NotRunnable(f"the working directory {path!r} does not exist", "give an existing one: --chdir DIR")
    return path


def _is_directory(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except PermissionError:
        hint = "give a directory that you may enter: --chdir DIR"
        raise NotRunnable(f"the working directory {path!r} cannot be reached: permission denied", hint) from None
    except OSError:
        return False


def _environment(export: str | None, added: dict[str, str]) -> dict[str, str]:
    """The submitter's environment. Variables that are not text are left out with a note: requests are JSON."""
    own = {name: value for name, value in os.environ.items() if _is_text(name) and _is_text(value)}
    if left_out := len(os.environ) - len(own):
        note(f"left out {show_count(left_out, 'environment variable')} that are not UTF-8 text")
    return {**parse.parse_export(export or "ALL", own), **added}


def _umask() -> int:
    umask = os.umask(0o077)
    os.umask(umask)
    return umask
