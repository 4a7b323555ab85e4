"""Checks whether a command can be started: its working directory, its program and the directories of its output exist
and may be used.

The checks use the credentials of the calling process, so the kernel decides, with access lists and network file systems
included. The daemon calls this in a process of the submitter (program.py), never in one of its own threads: a
directory may hang, and root would reveal what the submitter may not see. Nothing is opened or created.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
from collections.abc import Iterator

from carma.core.model.values import TaskSpec
from carma.errors import NotRunnable
from carma.launch.output_paths import PLACEHOLDERS, before_placeholders, unknown_placeholder

_OWN_FILE = "name a file in a directory of yours, for example with a full path"
SHELL_BUILTINS = ("alias", "cd", "exec", "export", "module", "set", "source", "ulimit", "unset")  # with no program


def check_runnable(spec: TaskSpec) -> None:
    """Raises NotRunnable. Uses only the fields that `needed_fields` keeps."""
    _check_directory(spec.directory)
    _check_program(spec)
    for flag, template in (("output", spec.output), ("error", spec.error)):
        if template:
            _check_output(flag, template, spec.directory)


def needed_fields(spec: TaskSpec) -> TaskSpec:
    """The spec without what the checks do not read: most of the environment, the arguments of the command."""
    environment = {name: value for name, value in spec.environment.items() if name == "PATH"}
    return TaskSpec(
        command=spec.command[:1],
        directory=spec.directory,
        environment=environment,
        output=spec.output,
        error=spec.error,
    )


def _check_directory(directory: str) -> None:
    denied = NotRunnable(
        f"you may not enter the working directory {directory}", "submit from another directory, or use --chdir"
    )
    try:
        mode = os.stat(directory).st_mode
    except PermissionError as error:
        raise denied from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotRunnable(
            f"the working directory {directory} does not exist", "submit from another directory, or use --chdir"
        ) from error
    except OSError as error:
        raise NotRunnable(f"the working directory {directory} cannot be used: {error.strerror}") from error
    if not stat.S_ISDIR(mode):
        raise NotRunnable(f"the working directory {directory} is not a directory")
    if not os.access(directory, os.X_OK):
        raise denied


def _check_program(spec: TaskSpec) -> None:
    program = spec.command[0]
    denied = ""
    if (program in (".", "..") or "/" in program) and os.path.isdir(os.path.join(spec.directory, program)):
        hint = f"name a program in it, for example: carma submit -- python {os.path.join(program, 'train.py')}"
        raise NotRunnable(f"the command {program} is a directory, not a program", hint)
    for path in candidates(spec):
        try:
            is_directory = stat.S_ISDIR(os.stat(path).st_mode)
        except PermissionError:
            denied = denied or (path if "/" in program else "")
            continue
        except OSError:
            continue
        if is_directory:
            continue
        if os.access(path, os.X_OK):
            return
        denied = denied or path
    raise _refusal(spec, denied)


def _refusal(spec: TaskSpec, denied: str) -> NotRunnable:
    """`denied`: the first file of that name that the user may not execute."""
    program, directory = spec.command[0], spec.directory
    hint = _script_hint(spec)
    if denied:
        hint = hint or f"chmod +x {denied}, or name its interpreter first"
        return NotRunnable(f"{denied} is not executable for you", hint)
    hint = hint or _form_hint(program)
    if program.startswith("/"):
        return NotRunnable(f"the program {program} does not exist", hint)
    if "/" in program:
        return NotRunnable(f"the program {program} does not exist in {directory}", hint)
    return NotRunnable(
        f"the program {program!r} is not in any directory of PATH",
        hint or "give its full path, or activate the environment that has it before you submit",
    )


def _script_hint(spec: TaskSpec) -> str:
    """How to submit a script that was named without its interpreter; empty for other programs."""
    script = spec.command[0]
    if not os.path.isfile(os.path.join(spec.directory, script)):
        return ""
    if script.endswith(".py"):
        has_python = shutil.which("python", path=spec.environment.get("PATH", os.defpath))
        return f"did you mean: carma submit -- {'python' if has_python else 'python3'} {shlex.quote(script)}"
    return f"did you mean: carma submit {shlex.quote(script)}" if script.endswith(".sh") else ""


def _form_hint(program: str) -> str:
    """What to do with a word that only a shell would understand; empty for others."""
    if re.match(r"[A-Za-z_]\w*=", program):
        return f"no shell interprets the command; set the variable with --export=ALL,{program}"
    if any(character.isspace() for character in program):
        return f"no shell interprets the command: remove the quotes, or write --wrap {shlex.quote(program)}"
    if program in SHELL_BUILTINS:
        return f"{program!r} is a command of the shell; write for example --wrap '{program} … && python train.py'"
    return ""


def candidates(spec: TaskSpec) -> Iterator[str]:
    """The paths at which the launch looks for the program, in that order."""
    program = spec.command[0]
    if "/" in program:
        yield os.path.join(spec.directory, program)
        return
    for entry in spec.environment.get("PATH", os.defpath).split(":"):
        yield os.path.join(spec.directory, entry, program)


def _check_output(flag: str, template: str, directory: str) -> None:
    """Checks the part of the path that is the same for every task and attempt."""
    if (place := unknown_placeholder(template)) is not None:
        known = ", ".join(f"%{letter} {meaning}" for letter, meaning in PLACEHOLDERS.items())
        raise NotRunnable(f"{place!r} in --{flag} {template} is unknown", f"known are {known}")
    fixed = before_placeholders(template)
    path = os.path.join(directory, fixed)
    folder = os.path.dirname(path) or "/"
    try:
        if not stat.S_ISDIR(os.stat(folder).st_mode):
            raise NotRunnable(f"--{flag} {template}: {folder} is not a directory")
    except PermissionError as error:
        raise NotRunnable(f"--{flag} {template}: {folder} cannot be reached: permission denied", _OWN_FILE) from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotRunnable(f"--{flag} {template}: there is no directory {folder}", f"mkdir -p {folder}") from error
    except OSError as error:
        raise NotRunnable(f"--{flag} {template} cannot be used: {error.strerror}") from error
    is_whole = fixed == template.replace("%%", "%")
    if is_whole and os.path.isdir(path):
        hint = f"name a file, for example {os.path.normpath(path)}/%j.out"
        raise NotRunnable(f"--{flag}: {os.path.normpath(path)} is a directory", hint)
    _check_may_write(f"--{flag} {template}", path, folder, is_whole, in_folder="/" not in template[len(fixed) :])


def _check_may_write(named: str, path: str, folder: str, is_whole: bool, in_folder: bool) -> None:
    """`is_whole`: `path` has no placeholders; `in_folder`: the file lies in `folder`, not in a directory below it."""
    if is_whole and os.path.lexists(path):
        if os.path.exists(path) and not os.access(path, os.W_OK):
            raise NotRunnable(f"{named}: you may not write to {path}", _OWN_FILE)
    elif in_folder and not os.access(folder, os.W_OK | os.X_OK):
        raise NotRunnable(f"{named}: you may not create files in {folder}", _OWN_FILE)
