"""Result files of benchmarks, and what benchmarks print.

1. JSON with one list element a line, so that two files can be compared, replaced as a whole.
2. The command that makes a file again, from the options that are not at their defaults.
3. Figures, printed as they are measured, and tables.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import msgspec

from carma.core.model.values import Record
from carma.demo.figures import percentile
from carma.errors import Usage
from carma_lab.bench.machine import facts, headline
from gpumemnet.directories import write_whole

DIGITS = 5  # more would be noise and would make every line differ
FLAGS = {"json": "out", "jobs": "parallel", "parts": "only"}  # options whose flag has another name
ARGUMENTS = ("truth",)  # options without a flag
REPEATED = ("task", "mechanism")  # options whose flag is given once for each value
PLACEHOLDERS = {"python": "PYTHON", "folds": "FOLDS"}  # paths of the machine that say nothing to others


class Figure(Record, frozen=True, kw_only=True):
    """One measured number; `how` says what was done to get it."""

    name: str
    value: float
    unit: str
    how: str


def percentiles(name: str, values_ms: Sequence[float], how: str) -> Iterator[Figure]:
    for percent in (50, 99):
        yield Figure(name=f"{name}.p{percent}", value=percentile(values_ms, percent), unit="ms", how=how)


class FigureLog:
    """Collects figures and prints each as it comes: on standard output, or on standard error where `out` is "-"."""

    def __init__(self, out: str | None) -> None:
        check_place(out)
        self.out = out
        self.machine = facts()
        self.figures: list[Figure] = []
        self._stream = sys.stderr if out == "-" else sys.stdout
        self.say(headline(self.machine))

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def add(self, figure: Figure) -> None:
        self.figures.append(figure)
        self.say(f"  {figure.name:<34} {three_digits(figure.value):>9} {figure.unit:<12} {figure.how}")

    def write(self, verb: str, options: msgspec.Struct, **more: Any) -> None:
        """The file: command, machine, and the figures last."""
        command = command_of(verb, options)
        write({"command": command, "machine": self.machine, **more, "figures": self.figures}, self.out)


def three_digits(value: float) -> str:
    """A number with three digits and without an exponent."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def write(report: msgspec.Struct | Mapping[str, Any], where: str | Path | None) -> None:
    """Into a file, to standard output for `-`, nowhere for None. Floats are rounded."""
    if where is None:
        return
    text = lines_of(rounded(msgspec.to_builtins(report)))
    path = Path(where)
    if where == "-":
        sys.stdout.write(text)
    elif path.is_symlink() or (path.exists() and not path.is_file()):  # a pipe: nothing may take its place
        path.write_text(text)
    else:
        write_whole(path, text.encode())


def lines_of(value: Mapping[str, Any]) -> str:
    """JSON in which each member is a line, and each element of a list."""
    parts = []
    for name, member in value.items():
        text = json.dumps(member, ensure_ascii=False)
        if isinstance(member, list) and member:
            text = "[\n" + ",\n".join(f"  {json.dumps(one, ensure_ascii=False)}" for one in member) + "\n ]"
        parts.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def rounded(value: Any, digits: int = DIGITS) -> Any:
    if isinstance(value, dict):
        return {key: rounded(part, digits) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [rounded(part, digits) for part in value]
    return round(value, digits) if isinstance(value, float) else value


def check_place(path: str | None) -> None:
    """Refuses a file that cannot be written, before minutes are spent. "-" and None are no files."""
    if path is None or path == "-":
        return
    parent = Path(path).absolute().parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise Usage(f"{path} cannot be written: {parent} is not a directory that you may write to.")
    if Path(path).is_dir():
        raise Usage(f"{path} cannot be written: it is a directory.", "Name a file in it.")


def command_of(verb: str, options: msgspec.Struct) -> str:
    """`carma bench VERB` with the options that are not at their defaults, without paths of this machine."""
    words = ["carma", "bench", verb]
    standard = type(options)()
    for field in msgspec.structs.fields(options):
        name, value = field.name, getattr(options, field.name)
        if value == getattr(standard, name) or (name == "out" and os.path.isabs(value)):
            continue
        flag = [] if name in ARGUMENTS else [f"--{FLAGS.get(name, name.removesuffix('_s'))}"]
        texts = [] if value is True else _texts(name, value)
        words += [word for text in texts for word in (*flag, text)] if texts else flag
    return shlex.join(words)


def _texts(name: str, value: Any) -> list[str]:
    if name in PLACEHOLDERS:
        return [PLACEHOLDERS[name]]
    match value:
        case tuple():
            return list(map(str, value)) if name in REPEATED else [",".join(map(str, value))]
        case float():
            return [f"{value:g}"]
        case _:
            return [os.path.basename(value) if os.path.isabs(str(value)) else str(value)]


def say(text: str) -> None:
    print(text, flush=True)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], to: TextIO | None = None) -> None:
    """The first column to the left, figures to the right; on standard output where `to` is not given."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    stream = to or sys.stdout
    console = Console(file=stream, highlight=False, markup=False, width=None if stream.isatty() else 160)
    console.print(table)


def shown(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def percent(part: float | None, sign: str = "") -> str:
    return "-" if part is None else f"{100 * part:{sign}.1f} %"
