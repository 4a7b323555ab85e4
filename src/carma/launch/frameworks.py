"""Which deep-learning frameworks, in which version, the Python has that a command will run. Nothing is run to find out.

Some limits can be given by name only to a framework that knows them: an older PyTorch dies of an option that is new. So
the interpreter is followed the way the kernel and Python would: through PATH, the first line of a script, `env` and the
like, to the packages that it would import. Where that way ends in the dark (a shell script may activate anything), the
answer is a guess over all interpreters that the environment points to, and says so. It must take milliseconds: it is
asked before each launch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from carma.core.model import Owner, Record
from carma.launch.packages import versions_in
from carma.launch.peek import Peek

PATH_LIMIT = 64  # folders of a PATH that are looked at
_HOPS = 8  # from script to interpreter to interpreter
_PYTHON = re.compile(r"(python|pypy)[0-9.]*t?")
_LONG_SHEBANG = re.compile(r"""^'''exec' ("?)(?P<path>/[^"\n]+?)\1 "\$0" "\$@"$""", re.MULTILINE)

# These run the program that they are given, with the same environment.
_WRAPPERS = frozenset(("chrt", "ionice", "nice", "nohup", "numactl", "setsid", "stdbuf", "taskset", "time", "timeout"))

# These run it somewhere else, in an environment that this one says nothing about.
_ENVIRONMENTS = frozenset(("conda", "hatch", "mamba", "micromamba", "pdm", "pipenv", "pixi", "poetry", "uv", "uvx"))
_CONTAINERS = frozenset(("apptainer", "docker", "enroot", "nerdctl", "nix", "nix-shell", "podman", "singularity"))
_ELSEWHERE = _ENVIRONMENTS | _CONTAINERS | {"srun", "ssh", "sudo"}


class Python(Record, frozen=True):
    """An interpreter, and the frameworks that it would import, with their versions ("" when they do not tell)."""

    path: str
    versions: dict[str, str]


class Frameworks(Record, frozen=True, kw_only=True):
    """`certain`: it is this one Python and no other. Otherwise these are all that it could be, as far as one sees."""

    pythons: tuple[Python, ...] = ()
    certain: bool = False
    set_by_command: frozenset[str] = frozenset()  # variables that the command line itself sets or removes
    clears_environment: bool = False  # `env -i`: what the launcher sets does not arrive

    def versions(self, framework: str) -> tuple[str, ...]:
        """All versions of it that the command could meet, each once."""
        return tuple(sorted({python.versions[framework] for python in self.pythons if framework in python.versions}))

    def reaches(self, variable: str) -> bool:
        """Whether a variable that the launcher sets is still there when the program starts."""
        return not self.clears_environment and variable not in self.set_by_command


def find(
    command: Sequence[str],
    environment: Mapping[str, str],
    directory: str,
    owner: Owner | None = None,
    *,
    peek: Peek | None = None,
) -> Frameworks:
    """Through the owner's eyes; without one, whatever this process can read. A `peek` has its own, and remembers from
    one call to the next what it read."""
    return _Search(peek or Peek(owner), dict(environment), directory).run(list(command))


class _Search:
    def __init__(self, peek: Peek, environment: dict[str, str], directory: str) -> None:
        self.peek = peek
        self.environment = environment
        self.directory = directory
        self.set_by_command: set[str] = set()
        self.clears = False

    def run(self, command: list[str]) -> Frameworks:
        rest = self._unwrap(command)
        pythons: tuple[Python, ...] = ()
        certain = False
        if rest and os.path.basename(rest[0]) not in _ELSEWHERE:
            path = self._interpreter(self._resolve(rest[0]))
            certain = path is not None
            pythons = (self._python(path, rest[1:]),) if path is not None else self._guesses()
        return Frameworks(
            pythons=pythons,
            certain=certain,
            set_by_command=frozenset(self.set_by_command),
            clears_environment=self.clears,
        )

    def _unwrap(self, command: list[str]) -> list[str]:
        """The command behind `env A=b`, `nice -n 5` and the like; empty when it cannot be told."""
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
                self._assign(arguments.pop(0), None)
            elif word.startswith("--unset="):
                self._assign(word.removeprefix("--unset="), None)
            elif word.startswith("-"):
                return []  # -S, -C, signals: not followed
            elif "=" in word:
                name, _, value = word.partition("=")
                self._assign(name, value)
            else:
                return [word, *arguments]
        return []

    def _assign(self, name: str, value: str | None) -> None:
        self.set_by_command.add(name)
        if value is None:
            self.environment.pop(name, None)
        else:
            self.environment[name] = value

    def _behind_wrapper(self, arguments: list[str]) -> list[str]:
        """From the first argument on that is a program: `timeout 60 python x` has its own ones before."""
        for place, word in enumerate(arguments):
            if not word.startswith("-") and self._resolve(word) is not None:
                return arguments[place:]
        return []

    def _resolve(self, program: str) -> str | None:
        """As the launch will: by the task's own PATH, from its own directory. Links stay as they are: a virtual
        environment is known by where its link lies."""
        if "/" in program:
            path = os.path.join(self.directory, program)
            return path if self.peek.is_program(path) else None
        return next((path for path in self._in_path(program) if self.peek.is_program(path)), None)

    def _in_path(self, program: str) -> list[str]:
        folders = self.environment.get("PATH", os.defpath).split(":")[:PATH_LIMIT]
        return [os.path.join(self.directory, folder, program) for folder in folders]

    def _interpreter(self, path: str | None) -> str | None:
        """The Python that runs this file: itself, or the one that its first line names."""
        for _ in range(_HOPS):
            if path is None:
                return None
            if _PYTHON.fullmatch(os.path.basename(path)):
                return path
            path = self._by_first_line(self.peek.text(path))
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
        if name == "sh":  # installers write this where the interpreter's path is too long for a first line
            long = _LONG_SHEBANG.search(text[:1024])
            return self._resolve(long["path"]) if long else None
        return self._resolve(words[0]) if "/" in words[0] else None

    def _guesses(self) -> tuple[Python, ...]:
        """The environment that is active, and every Python in PATH: a shell script may take any of them."""
        homes = [self.environment.get(name, "") for name in ("VIRTUAL_ENV", "CONDA_PREFIX")]
        paths = [os.path.join(self.directory, home, "bin", "python") for home in homes if home]
        paths += [path for name in ("python", "python3") for path in self._in_path(name)]
        found = dict.fromkeys(path for path in paths if self.peek.is_program(path))
        return tuple(self._python(path, []) for path in found)

    def _python(self, path: str, arguments: list[str]) -> Python:
        return Python(path, versions_in(self.peek, path, arguments, self.environment, self.directory))
