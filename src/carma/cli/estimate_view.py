"""Output of `carma estimate`: the estimate, its parts, its origin and the booking; or the reason why there is none."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from carma.cli.error_output import complain
from carma.cli.estimate_request import NO_OUTPUTS
from carma.cli.output import Column, Remark, heading, print_facts, print_json, print_remarked, safe, spinner
from carma.cli.wording import activity_text, level_text
from carma.core.model.units import show_count, show_mib, show_pair_mib
from carma.core.model.values import Estimate, Gpu, NoEstimate
from carma.core.ports import EstimateRequest
from carma.estimate.local import EstimatorAnswer
from carma.trial.cards import CARDS
from carma.trial.trial_reasons import Kind

COLUMNS = (
    Column("ESTIMATOR"),
    Column("FOOTPRINT", right=True),
    Column("BOUND", right=True),
    Column("TOOK", right=True),
    Column("REMARK", flexible=True),
)
REFUSED = "submit it with --gpu-mem if you know its size; otherwise CARMA learns the size from its first run"
_HINTS: dict[Kind, str] = {
    "crashed": "it would probably fail on a GPU too: fix it first",
    "no_gpu": "it needs no GPU memory: move its model to a GPU, or run it without CARMA",
    "time": "give it more time: --limit 10m",
    "no_torch": "if it imports torch later, give it more time: --limit 10m; otherwise submit it with --gpu-mem",
    "memory": "the setting memory.trial_memory_mib limits the host memory of trial runs",
}
_NO_BATCH = "the batch size is not known"  # in the refusals of estimators that use a model's layers
_MAX_CARDS = 5  # in a list
_NO_FIT = "it does not fit"  # beginning of an estimator's warning that the line about room replaces


def is_estimate(answer: EstimatorAnswer) -> bool:
    return isinstance(answer.result, Estimate)


def progress(request: EstimateRequest) -> AbstractContextManager[object]:
    command = safe(shlex.join(request.spec.command))[:60]
    return spinner(f"trial run of {command} on an emulated GPU", quiet=not command)


def print_found(found: Sequence[EstimatorAnswer], request: EstimateRequest, *, as_json: bool, compare: bool) -> None:
    if as_json:
        rows = [as_row(answer, request.gpus[0]) for answer in found]
        return print_json(rows if compare else rows[-1])
    if compare:
        return _print_comparison(found, request)
    for answer in found:
        if isinstance(answer.result, Estimate):
            _print_estimate(answer, answer.result, request)
        else:
            hint = _hint(answer, answer.result, request) if answer is found[-1] else ""
            complain(f"no estimate from {answer.estimator}: {answer.result.reason}", hint)
    return None


def as_row(answer: EstimatorAnswer, gpu: Gpu) -> dict[str, Any]:
    """The fields of --json, which are stable."""
    result = answer.result
    took_s = round(answer.took_s, 3)
    if isinstance(result, NoEstimate):
        return {"refused": result.reason, "estimator": answer.estimator, "gpu": gpu.name, "took_s": took_s}
    return {
        "estimator": answer.estimator,
        "gpu": gpu.name,
        "allocated_mib": result.allocated_mib,
        "reserved_mib": result.reserved_mib,
        "footprint_mib": result.footprint_mib,
        "bound_mib": result.upper_mib if _has_bound(result) else None,
        "level": result.level,
        "steps_seen": result.steps_seen,
        "rests_on": result.rests_on,
        "took_s": took_s,
        "warnings": result.warnings,
        "parts_mib": result.parts_mib,
        "demand": None if result.demand is None else msgspec.to_builtins(result.demand),
        "demand_predicted": result.demand_predicted,
    }


def _print_comparison(found: Sequence[EstimatorAnswer], request: EstimateRequest) -> None:
    rows, remarks = [], []
    for answer in found:
        result = answer.result
        footprint = bound = "-"
        if isinstance(result, NoEstimate):
            remarks.append(Remark("refused", result.reason))
        else:
            footprint = show_mib(result.footprint_mib)
            bound = show_mib(result.upper_mib) if _has_bound(result) else "-"
            count = show_count(len(result.warnings), "warning") if result.warnings else ""
            remarks.append(Remark(count, "; ".join(result.warnings)))
        rows.append([answer.estimator, footprint, bound, f"{answer.took_s:.1f} s"])
    heading(f"for {_gpus(request)}")
    print_remarked(COLUMNS, rows, remarks)


def _hint(answer: EstimatorAnswer, result: NoEstimate, request: EstimateRequest) -> str:
    if _NO_BATCH in result.reason and not request.spec.command:
        return "give it with --batch N, beside --summary"
    if NO_OUTPUTS in result.reason:
        return "a summary by print(model) needs the shape of one sample: --input 3x224x224, or --input 128 for words"
    return REFUSED if answer.kind is None else _HINTS[answer.kind]


def _print_estimate(answer: EstimatorAnswer, result: Estimate, request: EstimateRequest) -> None:
    room = _room(result, request)
    heading(_headline(result, request))
    if result.parts_mib:
        print()
        print_facts(((part.replace("_", " "), _size(mib)) for part, mib in result.parts_mib.items()), indent=2)
        print()
    warnings = (warning for warning in result.warnings if not (room and warning.startswith(_NO_FIT)))
    print_facts(
        [
            ("memory", _memory(result)),
            ("activity", _activity(result)),
            ("found", _origin(answer, result)),
            ("based on", result.rests_on),
            ("room", room),
            ("book", _booking(result, request)),
            *(("warning", warning) for warning in warnings),
        ]
    )


def _headline(result: Estimate, request: EstimateRequest) -> str:
    """`4.9 GiB (at most 5.3 GiB at 99 %) on an NVIDIA H200`."""
    if not _has_bound(result):
        return f"{show_mib(result.footprint_mib)}, without a bound, on {_gpus(request)}"
    point, bound = show_pair_mib(result.footprint_mib, result.upper_mib)
    return f"{point} (at most {bound}{level_text(result.level)}) on {_gpus(request)}"


def _has_bound(result: Estimate) -> bool:
    """A formula has no bound: it returns its figure as the upper limit, without a level."""
    return result.level is not None or result.upper_mib > result.footprint_mib


def _gpus(request: EstimateRequest) -> str:
    name = request.gpus[0].name
    if len(request.gpus) > 1:
        return f"each of {len(request.gpus)} GPUs ({name})"
    return f"{'an' if name.startswith(('NVIDIA', 'A')) else 'a'} {name}"


def _activity(result: Estimate) -> str:
    if result.demand is None:
        return ""
    text = f"{activity_text(lambda name: getattr(result.demand, name, None))} of a GPU alone"
    return f"{text} (predicted from its layers; lower if it waits for data)" if result.demand_predicted else text


def _memory(result: Estimate) -> str:
    parts = (
        "" if result.allocated_mib is None else f"{_size(result.allocated_mib)} allocated (tensors)",
        "" if result.reserved_mib is None else f"{show_mib(result.reserved_mib)} reserved (with the allocator's cache)",
        f"{show_mib(result.footprint_mib)} footprint (all memory of the process)",
    )
    return ", ".join(part for part in parts if part)


def _origin(answer: EstimatorAnswer, result: Estimate) -> str:
    by = "by a trial run on an emulated GPU" if answer.estimator == "trace" else f"by the estimator {answer.estimator}"
    steps = "" if result.steps_seen is None else f", {show_count(result.steps_seen, 'optimizer step')}"
    if answer.remembered_s is not None:
        return f"{by}{steps}; cached from an earlier trial run of {answer.remembered_s:.1f} s"
    return f"{by}{steps}; took {answer.took_s:.1f} s"


def _room(result: Estimate, request: EstimateRequest) -> str:
    """A warning if the GPU is too small."""
    room_mib = request.gpus[0].memory_mib
    if result.upper_mib <= room_mib:
        return ""
    would = "does" if result.footprint_mib > room_mib else "may"
    return f"it {would} not fit: this GPU has {show_mib(room_mib)}; {_larger(result.upper_mib)}"


def _larger(needed_mib: int) -> str:
    """The cards with enough memory, the smallest first."""
    cards = sorted((card for card in CARDS if card.memory_mib >= needed_mib), key=lambda card: card.memory_mib)
    if not cards:
        return "no known card has room for it"
    names = ", ".join(card.alias for card in cards[:_MAX_CARDS])
    more = f" and {len(cards) - _MAX_CARDS} more" if len(cards) > _MAX_CARDS else ""
    return f"these have room: {names}{more} (--gpu NAME selects one)"


def _booking(result: Estimate, request: EstimateRequest) -> str:
    """The command to submit, for an estimate with a bound that fits the GPU."""
    if not _has_bound(result) or result.upper_mib > request.gpus[0].memory_mib:
        return ""
    gpus = ["--gpus", str(len(request.gpus))] if len(request.gpus) > 1 else []
    options = [*gpus, "--gpu-mem", f"{result.upper_mib}M"]
    command = request.spec.command
    return shlex.join(["carma", "submit", *options, "--", *command] if command else options)


def _size(mib: int) -> str:
    """A small model has weights too."""
    return "< 1 MiB" if mib == 0 else show_mib(mib)
