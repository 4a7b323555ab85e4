"""How `carma estimate` says what it found: the answer first, then its parts, how it was found and what to book."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from carma.cli.error_output import complain
from carma.cli.estimate_request import NO_OUTPUTS
from carma.cli.output import Column, Remark, heading, print_facts, print_json, print_remarked, safe
from carma.cli.wording import BUSY, many
from carma.core.model.units import show_mib, show_pair_mib
from carma.core.model.values import Estimate, Gpu, NoEstimate
from carma.core.ports import EstimateRequest
from carma.estimate.local import Answer
from carma.trial.cards import CARDS
from carma.trial.trial_reasons import Kind

COLUMNS = (
    Column("ESTIMATOR"),
    Column("FOOTPRINT", right=True),
    Column("BOUND", right=True),
    Column("TOOK", right=True),
    Column("REMARK", flexible=True),
)
_HOW = {"trace": "by a trial run with a GPU that was made up"}
REFUSED = "submit it with --gpu-mem if you know its size; without, it starts where there is room, and CARMA learns it"
_HINTS: dict[Kind, str] = {
    "crashed": "it would most likely fail on a GPU, too: mend it first",
    "no_gpu": "as it is, it needs no GPU memory: move its model to a GPU, or run it without CARMA",
    "time": "--limit gives it more time: --limit 10m",
    "memory": "the setting memory.trial_memory_mib gives trial runs more of the host's memory",
}
_NO_BATCH = "the batch size is not known"  # as those say it who count by a model's layers
_CARDS_NAMED = 5
_NO_FIT = "it does not fit"  # an estimator's own warning; the line about room says the same with the figure


def is_estimate(answer: Answer) -> bool:
    return isinstance(answer.said, Estimate)


@contextlib.contextmanager
def working(request: EstimateRequest, *, quiet: bool) -> Iterator[None]:
    """One line on a terminal's stderr while it takes its time; nothing where nobody looks."""
    if quiet or not request.spec.command or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, markup=False, highlight=False)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(f"trying {safe(shlex.join(request.spec.command))[:60]} with a made-up GPU", total=None)
        yield


def print_found(found: Sequence[Answer], request: EstimateRequest, *, as_json: bool, compare: bool) -> None:
    gpu = request.gpus[0]
    if as_json:
        rows = [as_row(answer, gpu) for answer in found]
        print_json(rows if compare else rows[-1])
    elif compare:
        _print_comparison(found, request)
    else:
        _print_one(found, request)


def as_row(answer: Answer, gpu: Gpu) -> dict[str, Any]:
    """The names that `--json` promises."""
    said = answer.said
    took_s = round(answer.took_s, 3)
    if isinstance(said, NoEstimate):
        return {"refused": said.reason, "estimator": answer.estimator, "gpu": gpu.name, "took_s": took_s}
    return {
        "estimator": answer.estimator,
        "gpu": gpu.name,
        "allocated_mib": said.allocated_mib,
        "reserved_mib": said.reserved_mib,
        "footprint_mib": said.footprint_mib,
        "bound_mib": said.upper_mib if _has_bound(said) else None,
        "level": said.level,
        "steps_seen": said.steps_seen,
        "rests_on": said.rests_on,
        "took_s": took_s,
        "warnings": said.warnings,
        "parts_mib": said.parts_mib,
        "demand": None if said.demand is None else msgspec.to_builtins(said.demand),
        "demand_predicted": said.demand_predicted,
    }


def _busy(said: Estimate) -> str:
    """Of a GPU that it has alone, where that is known."""
    if said.demand is None:
        return ""
    known = [(what, getattr(said.demand, name, None)) for name, what in BUSY.items()]
    parts = [f"{what} {100 * share:.0f} %" for what, share in known if share is not None]
    told = f"{', '.join(parts)} of a GPU alone"
    return f"{told} (predicted from its layers; less where data comes late)" if said.demand_predicted else told


def _print_comparison(found: Sequence[Answer], request: EstimateRequest) -> None:
    rows, remarks = [], []
    for answer in found:
        said = answer.said
        took = f"{answer.took_s:.1f} s"
        if isinstance(said, NoEstimate):
            rows.append([answer.estimator, "-", "-", took])
            remarks.append(Remark("refused", said.reason))
        else:
            bound = show_mib(said.upper_mib) if _has_bound(said) else "-"
            rows.append([answer.estimator, show_mib(said.footprint_mib), bound, took])
            remarks.append(
                Remark(many(len(said.warnings), "warning") if said.warnings else "", "; ".join(said.warnings))
            )
    heading(f"for {_on(request)}")
    print_remarked(COLUMNS, rows, remarks)


def _print_one(found: Sequence[Answer], request: EstimateRequest) -> None:
    """The last one answered, or nobody did."""
    for answer in found:
        if isinstance(answer.said, NoEstimate):
            last = answer is found[-1]
            hint = _hint(answer, answer.said, request) if last else ""
            complain(f"no estimate by {answer.estimator}: {answer.said.reason}", hint)
        else:
            _print_estimate(answer, answer.said, request)


def _hint(answer: Answer, said: NoEstimate, request: EstimateRequest) -> str:
    """What to do about it, which depends on why there is none. A trial run is told nothing: it sees for itself."""
    if _NO_BATCH in said.reason and not request.spec.command:
        return "say it with --batch N, beside --summary"
    if NO_OUTPUTS in said.reason:
        return "with print(model), say what one sample is: --input 3x224x224 for images, --input 128 for words"
    return REFUSED if answer.kind is None else _HINTS[answer.kind]


def _print_estimate(answer: Answer, said: Estimate, request: EstimateRequest) -> None:
    room = _room(said, request)
    heading(_headline(said, request))
    if said.parts_mib:
        print()
        print_facts(((_words(part), _show(mib)) for part, mib in said.parts_mib.items()), indent=2)
        print()
    print_facts(
        [
            ("memory", _three(said)),
            ("keeps busy", _busy(said)),
            ("found", _how(answer, said)),
            ("rests on", said.rests_on),
            ("room", room),
            ("book", _booking(said, request)),
            *(("beware", warning) for warning in said.warnings if not (room and warning.startswith(_NO_FIT))),
        ]
    )


def _headline(said: Estimate, request: EstimateRequest) -> str:
    """`4.9 GiB (at most 5.3 GiB at 99 %) on an NVIDIA H200`."""
    if not _has_bound(said):
        return f"{show_mib(said.footprint_mib)}, without a bound, on {_on(request)}"
    point, bound = show_pair_mib(said.footprint_mib, said.upper_mib)
    level = "" if said.level is None else f" at {100 * said.level:g} %"
    return f"{point} (at most {bound}{level}) on {_on(request)}"


def _has_bound(said: Estimate) -> bool:
    """A formula books its own figure and promises nothing."""
    return said.level is not None or said.upper_mib > said.footprint_mib


def _on(request: EstimateRequest) -> str:
    name = request.gpus[0].name
    if len(request.gpus) > 1:
        return f"each of {len(request.gpus)} GPUs ({name})"
    return f"{'an' if name.startswith(('NVIDIA', 'A')) else 'a'} {name}"


def _three(said: Estimate) -> str:
    """The three numbers that are never mixed."""
    parts = [
        None if said.allocated_mib is None else f"{_show(said.allocated_mib)} allocated (tensors)",
        None if said.reserved_mib is None else f"{show_mib(said.reserved_mib)} reserved (with the allocator's cache)",
        f"{show_mib(said.footprint_mib)} footprint (all that the process holds)",
    ]
    return ", ".join(part for part in parts if part)


def _how(answer: Answer, said: Estimate) -> str:
    steps = "" if said.steps_seen is None else f", {many(said.steps_seen, 'optimizer step')} seen"
    took = f"it took {answer.took_s:.1f} s"
    if answer.remembered_s is not None:
        took = f"remembered from an earlier trial run (which took {answer.remembered_s:.1f} s)"
    return f"{_HOW.get(answer.estimator, f'by the estimator {answer.estimator}')}{steps}; {took}"


def _room(said: Estimate, request: EstimateRequest) -> str:
    """Only where there is not enough: that is what one wants to know before waiting for a GPU."""
    room_mib = request.gpus[0].memory_mib
    if said.upper_mib <= room_mib:
        return ""
    would = "would" if said.footprint_mib > room_mib else "may"
    return f"it {would} not fit: this GPU has {show_mib(room_mib)}; {_larger(said.upper_mib)}"


def _larger(needed_mib: int) -> str:
    """The cards that it would fit on, the smallest first."""
    cards = sorted((card for card in CARDS if card.memory_mib >= needed_mib), key=lambda card: card.memory_mib)
    if not cards:
        return "no card that is known has room for it"
    names = ", ".join(card.alias for card in cards[:_CARDS_NAMED])
    more = f" and {len(cards) - _CARDS_NAMED} more" if len(cards) > _CARDS_NAMED else ""
    return f"these have room: {names}{more} (--gpu NAME asks for one)"


def _booking(said: Estimate, request: EstimateRequest) -> str:
    """What to write, where somebody stands for the figure and a GPU can be booked for it."""
    if not _has_bound(said) or said.upper_mib > request.gpus[0].memory_mib:
        return ""
    words = ["carma", "submit"]
    if len(request.gpus) > 1:
        words += ["--gpus", str(len(request.gpus))]
    words += ["--gpu-mem", f"{said.upper_mib}M"]
    return shlex.join([*words, "--", *request.spec.command]) if request.spec.command else shlex.join(words[2:])


def _show(mib: int) -> str:
    """A small model has weights, too."""
    return "< 1 MiB" if mib == 0 else show_mib(mib)


def _words(part: str) -> str:
    return part.replace("_", " ")
