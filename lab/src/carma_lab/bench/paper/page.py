"""README.md beside the file: its tables, made from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from carma_lab.bench.paper import page_parts
from carma_lab.bench.paper.markdown import table
from carma_lab.bench.paper.scope import PARTS
from gpumemnet.directories import write_whole

NAME = "README.md"
HEAD = """# The published experiments, simulated

<!-- Made by `carma bench paper`; changes here are lost. -->

Every figure here is from [paper.json](paper.json), which says of each part when, where and by which command it came.
GPUs are simulated ([how](../../../docs/simulation.md)): A100s of 40 GB. Exclusive GPUs, in the order of arrival, are 1.
*Run* is mean run time of a task as a part of that with exclusive GPUs, *slowdown* the mean over tasks of the run that
succeeded against the run alone. *Code* is a digest of what decides and simulates: only parts with the same one go
together.
"""
VERDICTS = {True: "met", False: "**not met**", None: "not run"}


def write(out: Path, found: Mapping[str, Any]) -> Path:
    path = out / NAME
    write_whole(path, text(found).encode())
    return path


def text(found: Mapping[str, Any]) -> str:
    parts = found["parts"]
    told = [HEAD]
    if found["quick"]:
        told.append("**A quick run**: few cases, to see that it works. No figure here means much.\n")
    told += [_made(parts), *_mixed(parts), "## Aims\n", _claims(found["claims"])]
    for part in PARTS:
        if part in parts:
            told += page_parts.MAKERS[part](parts[part])
    return "\n".join(told)


def _made(parts: Mapping[str, Any]) -> str:
    rows = (
        (f"`{name}`", about["date"], f"`{about['command']}`", f"{about['took_s']:.0f} s", about["cpu"],
         f"{about['load_before']:g}", f"CARMA {about['carma']}, Python {about['python']}", str(about["seed"]),
         about["code"] + (" **and later**" if about["code_changed"] else ""))
        for name, about in ((name, part["about"]) for name, part in parts.items())
    )  # fmt: skip
    return table(("part", "date", "command", "took", "machine", "load before", "versions", "seed", "code"), rows)


def _mixed(parts: Mapping[str, Any]) -> list[str]:
    codes = {part["about"]["code"] for part in parts.values()}
    changed = [name for name, part in parts.items() if part["about"]["code_changed"]]
    if len(codes) <= 1 and not changed:
        return []
    return ["**These parts are not of one version of the code**: they are not to be compared with each other.\n"]


def _claims(claims: Sequence[Mapping[str, Any]]) -> str:
    rows: Iterable[Sequence[str]] = ((one["aim"], one["found"], VERDICTS[one["met"]]) for one in claims)
    return table(("aim", "found", ""), rows)
