"""How a study is written down: what it was measured on, a row a line, whole at every moment; and tables for people."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from carma.core.model.values import Gpu
from carma.errors import Usage
from carma.monitor.nvml import NvmlSampler
from carma_lab.bench.machine import facts


def about(gpu: Gpu, sampler: NvmlSampler, torch: str, command: str) -> dict[str, Any]:
    """The machine, the versions and the command that measures it again."""
    machine = facts()
    return {
        "gpu": gpu.name,
        "memory_mib": gpu.memory_mib,
        "activity_from": gpu.capabilities.source,
        "driver": sampler.driver(),
        "torch": torch,
        "python": machine.python,
        "carma": machine.carma,
        "cpu": machine.cpu,
        "cores": machine.cores,
        "date": time.strftime("%Y-%m-%d"),
        "command": command,
    }


def command_of(verb: str, options: msgspec.Struct) -> str:
    """`carma bench VERB` with the flags that are not at their defaults."""
    words = ["carma", "bench", verb]
    standard = type(options)()
    for field in msgspec.structs.fields(options):
        value = getattr(options, field.name)
        if value == getattr(standard, field.name):
            continue
        flag = "--out" if field.name == "json" else "--" + field.name.removesuffix("_s")
        words += [word for text in _texts(value) for word in (flag, text)]
    return shlex.join(words)


def _texts(value: Any) -> list[str]:
    """Names are given one by one, numbers in one list."""
    if not isinstance(value, tuple):
        return [f"{value:g}" if _is_float(value) else str(value)]
    return list(value) if value and isinstance(value[0], str) else [",".join(map(str, value))]


def _is_float(value: object) -> bool:
    return isinstance(value, float)


def write(path: str, head: dict[str, Any], name: str, rows: Iterable[msgspec.Struct]) -> None:
    """A row a line, so that two files can be compared. The old file stays until the new one is whole."""
    lines = ",\n".join("  " + msgspec.json.encode(rounded(msgspec.to_builtins(row))).decode() for row in rows)
    text = json.dumps(rounded(head), indent=1, ensure_ascii=False).removesuffix("\n}")
    beside = Path(f"{path}.part")
    beside.write_text(f'{text},\n "{name}": [\n{lines}\n ]\n}}\n', encoding="utf-8")
    os.replace(beside, path)


def rounded(value: Any) -> Any:
    """Five places: more would be noise, and would make every line differ."""
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [rounded(part) for part in value]
    return round(value, 5) if _is_float(value) else value


def check_place(path: str) -> None:
    """Before minutes are spent on what could then not be written."""
    parent = Path(path).absolute().parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise Usage(f"{path} cannot be written: {parent} is not a directory that you may write to.")
    if Path(path).is_dir():
        raise Usage(f"{path} cannot be written: it is a directory.", "Name a file in it.")


def say(text: str) -> None:
    print(text, flush=True)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """The first column to the left, figures to the right."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console(file=sys.stdout, highlight=False, markup=False, width=None if sys.stdout.isatty() else 160)
    console.print(table)


def shown(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)
