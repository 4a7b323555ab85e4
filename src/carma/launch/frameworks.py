"""Finds the deep-learning frameworks, with their versions, that a command would import. Runs nothing.

Some memory limits may be given only to a framework version that knows them: an older PyTorch refuses an unknown option
and the program ends. So the interpreter is resolved as the kernel and Python would do it: through PATH, the first line
of a script, `env` and similar wrappers, to the packages that it would import. If that is not possible (a shell script
may activate any environment), the result lists all interpreters that the environment names, with `certain` False.

Files are read with the credentials of the calling process. The daemon calls this in a process of the task's owner
(daemon/probes/program.py), never in one of its own threads.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from carma.core.model.values import Frameworks, Interpreter
from carma.launch.imported_packages import is_program, read_start, versions_in

PATH_LIMIT = 64  # directories of PATH that are searched
_HOPS = 8  # from script to interpreter to interpreter
_PYTHON = re.compile(r"(python|pypy)[0-9.]*t?")
_LONG_SHEBANG = re.compile(r"""^'''exec' ("?)(?P<path>/[^"\n]+?)\1 "\$0" "\$@"$""", re.MULTILINE)

# Programs that run another program with the same environment.
_WRAPPERS = frozenset(("chrt", "ionice", "nice", "nohup", "numactl", "setsid", "stdbuf", "taskset", "time", "timeout"))

# Programs that run another program in an environment that cannot be found out here.
_ENVIRONMENTS = frozenset(("conda", "hatch", "mamba", "micromamba", "pdm", "pipenv", "pixi", "poetry", "uv", "uvx"))
_CONTAINERS = frozenset(("apptainer", "docker", "enroot", "nerdctl", "nix", "nix-shell", "podman", "singularity"))
_ELSEWHERE = _ENVIRONMENTS | _CONTAINERS | {"srun", "ssh", "sudo"}


def find(command: Sequence[str], environment: Mapping[str, str], directory: str) -> Frameworks:
    """Limited to files that this process may read. Takes some milliseconds on a local disk."""
    return _Search(dict(environment), directory).run(list(command))


class _Search:
    def __init__(self, environment: dict[str, str], directory: str) -> None:
        self.environment = environment
        self.directory = directory
        self.set_by_command: set[str] = set()
        self.clears = False

    def run(self, command: list[str]) -> Frameworks:
        rest = self._unwrap(command)
        interpreters: tuple[Interpreter, ...] = ()
        path = None
        if rest and os.path.basename(rest[0]) not in _ELSEWHERE:
            path = self._interpreter(self._resolve(rest[0]))
            interpreters = self._candidates() if path is None else (self._described(path, rest[1:]),)
        variables = frozenset(self.set_by_command)
        return Frameworks(
            interpreters=interpreters,
            certain=path is not None,
            set_by_command=variables,
            clears_environment=self.clears,
        )

    def _unwrap(self, command: list[str]) -> list[str]:
        """The command after `env A=b`, `nice -n 5` and similar wrappers; empty if it cannot be found."""
        for _ in range(_HOPS):
            name = os.path.basename(command[0]) if command else ""
            if name == "env":
                command = self._behind_env(command[1:])
            elif name in _WRAPPERS:
                command = self._behind_wrapper(command[1:])
            else:
                return command
        return []

    def _behind_env(self, arguments: list[str]) -> list[str]:
        while arguments:
            word, arguments = arguments[0], arguments[1:]
            if word in ("-", "-i", "--ignore-environment"):
                self.clears = True
                self.environment.clear()
            elif word in ("-u", "--unset") and arguments:
                self._assign(arguments.pop(0))
            elif word.startswith("--unset="):
                self._assign(word.removeprefix("--unset="))
            elif word.startswith("-"):
                return []  # -S, -C, signals: not supported
            elif "=" in word:
                self._assign(*word.split("=", 1))
            else:
                return [word, *arguments]
        return []

    def _assign(self, name: str, value: str | None = None) -> None:
        self.set_by_command.add(name)
        if value is None:
            self.environment.pop(name, None)
        else:
            self.environment[name] = value

    def _behind_wrapper(self, arguments: list[str]) -> list[str]:
        """The arguments from the first program on: `timeout 60 python x` has an argument of its own before it."""
        for place, word in enumerate(arguments):
            if not word.startswith("-") and self._resolve(word) is not None:
                return arguments[place:]
        return []

    def _resolve(self, program: str) -> str | None:
        """The path of a program, found as the launch finds it: by the task's PATH, from its directory. Links are not
        resolved, because a virtual environment is identified by the place of its link."""
        paths = [os.path.join(self.directory, program)] if "/" in program else self._in_path(program)
        return next((path for path in paths if is_program(path)), None)

    def _in_path(self, program: str) -> list[str]:
        folders = self.environment.get("PATH", os.defpath).split(":")[:PATH_LIMIT]
        return [os.path.join(self.directory, folder, program) for folder in folders]

    def _interpreter(self, path: str | None) -> str | None:
        """The Python that runs this file: the file itself, or the one that its first line names."""
        for _ in range(_HOPS):
            if path is None:
                return None
            if _PYTHON.fullmatch(os.path.basename(path)):
                return path
            path = self._by_first_line(read_start(path))
        return None

    def _by_first_line(self, text: str) -> str | None:
        if not text.startswith("#!"):
            return None
        words = text[2:].split("\n", 1)[0].split()
        if not words:
            return None
        name = os.path.basename(words[0])
        if name == "env":
            behind = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
            return self._resolve(behind[0]) if behind else None
        if name == "sh":  # written by installers if the interpreter's path is too long for a first line
            long = _LONG_SHEBANG.search(text[:1024])
            return self._resolve(long["path"]) if long else None
        return self._resolve(words[0]) if "/" in words[0] else None

    def _candidates(self) -> tuple[Interpreter, ...]:
        """The active environment, and every Python in PATH: a shell script may use any of them."""
        homes = [self.environment.get(name, "") for name in ("VIRTUAL_ENV", "CONDA_PREFIX")]
        paths = [os.path.join(self.directory, home, "bin", "python") for home in homes if home]
        paths += [path for name in ("python", "python3") for path in self._in_path(name)]
        found = dict.fromkeys(path for path in paths if is_program(path))
        return tuple(self._described(path, []) for path in found)

    def _described(self, path: str, arguments: list[str]) -> Interpreter:
        return Interpreter(path, versions_in(path, arguments, self.environment, self.directory))
