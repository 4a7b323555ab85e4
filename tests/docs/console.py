"""Runs the console blocks of a page against a real daemon, and compares what they print with what the page says.

In the page's output `…` (or `...`) stands for anything. Times, durations, pids and UUIDs may differ, and where lines
are folded does not matter. A command that only looks is repeated until it prints what the page says, because the page
shows the state after a moment; any other command runs once.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tests.docs.markdown import Block

LIMIT_S = 180.0
LOOKS = ("queue", "ls", "show", "logs", "explain", "gpus", "info", "history", "config", "doctor", "report", "users")
_VOLATILE = (
    # Not what a task "has" to save: that is set, and always the same.
    (re.compile(r"\b(?<!it has )(?:\d{4}-\d\d-\d\d )?\d\d:\d\d(?::\d\d)?\b"), "TIME"),
    (re.compile(r"\b(?<!it has )\d+(?:\.\d+)? s\b"), "TIME"),
    (re.compile(r"\b(pid|process) \d+"), r"\1 PID"),
    (re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"), "UUID"),
    (re.compile(r"^carma: .* \.\.\.\n", re.MULTILINE), ""),  # progress, only of a command that takes long
    (re.compile(r"\s+"), " "),
)
_ANYTHING = re.compile(r"\s*(?:…|\.\.\.)\s*")


class Step(NamedTuple):
    line: int
    command: str
    output: str

    @property
    def looks(self) -> bool:
        """Whether it changes nothing, so that it can be repeated."""
        words = shlex.split(self.command, comments=True)
        return len(words) > 1 and words[0] == "carma" and words[1] in LOOKS and "-f" not in words


class Ran(NamedTuple):
    code: int
    output: str


def steps(block: Block) -> list[Step]:
    """`$ command` lines with the output below each; a backslash at the end goes on in the next line."""
    found: list[Step] = []
    for number, line in enumerate(block.text.splitlines(), block.line + 1):
        if line.startswith("$ "):
            found.append(Step(number, line.removeprefix("$ "), ""))
        elif found and found[-1].command.endswith("\\"):
            found[-1] = found[-1]._replace(command=f"{found[-1].command}\n{line.removeprefix('> ')}")
        elif found:
            found[-1] = found[-1]._replace(output=f"{found[-1].output}{line}\n")
        elif line.strip():
            raise AssertionError(f"line {number}: a console block begins with a command, not with {line!r}")
    return found


def matches(output: str, documented: str) -> bool:
    pieces = [re.escape(normal(piece)) for piece in _ANYTHING.split(documented)]
    return re.fullmatch(".*?".join(pieces), normal(output)) is not None


def normal(text: str) -> str:
    for pattern, instead in _VOLATILE:
        text = pattern.sub(instead, text)
    return text.strip()


class Terminal:
    """A shell user with a home of their own, in which `carma` and `python` are those of this test run."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.directory = home / "work"
        programs = home / "bin"
        for made in (self.directory, programs):
            made.mkdir()
        for script in ("train.py", "compare.py"):  # the user's; a page may define them
            (self.directory / script).touch()
        _program(programs / "carma", f'exec {shlex.quote(sys.executable)} -m carma "$@"')
        _program(programs / "python", f'exec {shlex.quote(sys.executable)} "$@"')
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("CARMA_")},
            "CARMA_HOME": str(home),
            "PYTHON": str(programs / "python"),
            "PATH": f"{programs}:{os.environ.get('PATH', '/usr/bin:/bin')}",
            "COLUMNS": "100",
            "NO_COLOR": "1",
        }

    def run(self, command: str) -> Ran:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.directory,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=2 * LIMIT_S,
            check=False,
        )
        return Ran(done.returncode, done.stdout)

    def check(self, step: Step) -> None:
        """Run it, again if it only looks, until it prints what the page says."""
        deadline_s = time.monotonic() + (LIMIT_S if step.looks else 0.0)
        while not matches((ran := self.run(step.command)).output, step.output):
            if time.monotonic() >= deadline_s:
                raise AssertionError(
                    f"line {step.line}: $ {step.command}\n-- the page says --\n{step.output}"
                    f"-- it prints (exit code {ran.code}) --\n{ran.output}"
                )
            time.sleep(0.05)


def _program(file: Path, line: str) -> None:
    file.write_text(f"#!/bin/sh\n{line}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
