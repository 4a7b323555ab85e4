"""`carma bench paper`: the parts, one after the other; after each of them its place in the file is written."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from carma.core.model.values import Record
from carma.errors import Refused, Usage
from carma_lab.bench.paper import curves, limits, page, published, seeds, workloads
from carma_lab.bench.paper import paper_file as writing
from carma_lab.bench.paper.cases import OnCaseProgress, Results, to_stderr
from carma_lab.bench.paper.plots import pictures
from carma_lab.bench.paper.variants import LARGE, PARTS, QUICK, Scope
from carma_lab.bench.results_file import command_of
from carma_lab.reports.drawing import Picture, save
from gpumemnet.directories import make_folder

Draw = Callable[[Sequence[Picture], Path], list[Path]]
LIMITED = ("curves", "limits", "philly")  # parts that work out limits


class Options(Record, frozen=True, kw_only=True):
    out: Path = Path("lab/results/simulation")
    quick: bool = False
    only: tuple[str, ...] = ()
    jobs: int = 1
    seeds: int | None = None
    windows: int | None = None
    philly: Path | None = None
    redraw: bool = False


def run(options: Options, draw: Draw = save, on_progress: OnCaseProgress | None = None) -> int:
    """`draw` writes the pictures. `on_progress` is called with the progress of a case."""
    scope = scope_of(options)
    parts = () if options.redraw else wanted(options)
    found = writing.read(options.out)
    if options.redraw and not found:
        raise Usage(f"{options.out / writing.NAME}: no such file", "--redraw shows what an earlier run has written.")
    if parts and scope.quick and found.get("quick") is False:
        there = f"{options.out / writing.NAME} holds the whole study, and a quick one would take its place"
        raise Usage(there, "Give --out another directory, as in --quick --out quick.")
    if parts and options.philly is not None:
        workloads.philly(options.philly, seed=scope.seed)  # that it can be read, before an hour is spent on the others
    make_folder(options.out)
    results = Results(options.jobs, to_stderr, on_progress)
    found = writing.judged(found) if options.redraw else found
    for part in parts:
        to_stderr(f"{part}:")
        before, began = writing.code(), time.perf_counter()
        made = _made(part, scope, results, options.philly)
        took_s = time.perf_counter() - began
        made = {"about": writing.about(scope, command_of("paper", options), took_s, before), **made}
        found = writing.merged(found, part, made, scope)
        writing.write(options.out, found)
        to_stderr(f"{part}: {took_s:.0f} s")
    if options.redraw:
        writing.write(options.out, found)
    written = [options.out / writing.NAME, page.write(options.out, found), *draw(pictures(found["parts"]), options.out)]
    _tell(found, written)
    return 0


def scope_of(options: Options) -> Scope:
    scope = QUICK if options.quick else Scope()
    seeds, windows = options.seeds or scope.seeds, options.windows or scope.windows
    return replace(scope, seeds=seeds, windows=windows)


def wanted(options: Options) -> tuple[str, ...]:
    """The named parts; else all, without Philly if its file was not given."""
    if "philly" in options.only and options.philly is None:
        raise Usage("the part philly needs the public trace", "--philly FILE; docs/traces.md says where it is found")
    left_out = () if options.philly is not None else ("philly",)
    return tuple(part for part in PARTS if (part in options.only if options.only else part not in left_out))


def check_packages(options: Options) -> None:
    """Refuses before the first simulation: pictures are drawn at the end, and limits computed in between."""
    limited = not options.redraw and set(wanted(options)) & set(LIMITED)
    missing = [name for name in ("matplotlib", *(("scipy",) if limited else ())) if find_spec(name) is None]
    if missing:
        names = " and ".join(missing)
        are, them = ("are", "them") if len(missing) > 1 else ("is", "it")
        raise Refused(f"{names} {are} not installed, and this study needs {them}", f"pip install {' '.join(missing)}")


def _made(part: str, scope: Scope, results: Results, file: Path | None) -> dict[str, Any]:
    if part == "philly":
        assert file is not None  # wanted() has seen to it
        return limits.philly(scope, results, workloads.philly(file, seed=scope.seed))
    if part == "speed":
        whole = None if file is None else workloads.philly(file, LARGE, scope.seed)
        return limits.speed(scope, whole, to_stderr)
    made = {"tables": published.work, "curves": curves.work, "limits": limits.work, "seeds": seeds.work}
    return made[part](scope, results)


def _tell(found: dict[str, Any], written: Sequence[Path]) -> None:
    for claim in found["claims"]:
        verdict = {True: "met", False: "not met", None: "not run"}[claim["met"]]
        print(f"{verdict:8} {claim['aim']}: {claim['found']}")
    for path in written:
        print(str(path), file=sys.stderr)
