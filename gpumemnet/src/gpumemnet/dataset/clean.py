"""Selects measured rows for the data set. Rows that are left out are counted by their reason."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from carma.core.model.values import Record
from carma.errors import Usage
from gpumemnet.dataset.config import Config, encode
from gpumemnet.dataset.inside.rows import read_configs
from gpumemnet.dataset.schema import ACTIVITY

LEAST_STEPS = 2  # the optimizer allocates its tensors in the first step, so only the second has the full size
# Two runs of one config differ in what libraries load; if by more than this, they contradict each other.
APART_SHARE, APART_MIB = 0.05, 128.0
_MIB = 2.0**20
# Columns in MiB, and the fields of a row that they come from.
_FIGURES = {
    "allocated_mib": "allocated_peak", "requested_mib": "requested_peak", "reserved_mib": "reserved_peak",
    "footprint_mib": "footprint", "context_mib": "context",
}  # fmt: skip
_ACTIVITY = tuple(column.name for column in ACTIVITY)

FAILED = "the run failed"
UNKNOWN = "no config has its id"
MISSING = "a figure is missing or not finite"
SHORT = f"fewer than {LEAST_STEPS} steps"
CROWDED = "memory was short because of others beside it"
AGAIN = "two runs of it contradict one another"
TWIN = "the same run under another id is there"
OTHER = "the model that was measured is not the config's"
CHANGED = "another config had its id when it was measured"
NO_LAYERS = "its layers could not be listed"


class MeasuredRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `carma dataset collect`, in bytes; other fields are ignored."""

    id: str
    of: str | None = None  # digest of its config's line
    allocated_peak: float | None = None
    requested_peak: float | None = None
    reserved_peak: float | None = None
    footprint: float | None = None
    context: float | None = None
    steps: int = 0
    stepped: int | None = None  # steps of the optimizer; a gradient scaler skips some
    retries: int | None = 0
    oom: bool = False
    error: str | None = None
    alone: bool = False
    parameters: int | None = None
    step_ms: float | None = None
    sm_active: float | None = None
    sm_occupancy: float | None = None
    gr_active: float | None = None
    dram_active: float | None = None
    tensor_active: float | None = None
    power_w: float | None = None

    @property
    def columns(self) -> dict[str, object]:
        figures = {name: _mib(getattr(self, field)) for name, field in _FIGURES.items()}
        plain = {"steps": self.steps, "retries": self.retries or 0, "oom": self.oom, "alone": self.alone}
        return {**figures, **plain, **{name: getattr(self, name) for name in _ACTIVITY}}


class CleaningReport(Record, frozen=True, kw_only=True):
    rows: int  # measured
    kept: int
    oom: int  # of those kept
    dropped: dict[str, int]  # by reason
    examples: dict[str, str]  # one id for each reason


class Cleaning:
    def __init__(self) -> None:
        self.dropped: dict[str, list[str]] = {}

    def drop(self, why: str, id: str) -> None:
        self.dropped.setdefault(why, []).append(id)

    def clean(
        self, rows: Iterable[MeasuredRow], configs: Mapping[str, Config], digests: Mapping[str, str] | None = None
    ) -> dict[str, MeasuredRow]:
        """One row for each id, in the order of the configs. `digests`: of the configs' lines, by id."""
        good: dict[str, list[MeasuredRow]] = {}
        for row in rows:
            is_changed = row.of is not None and digests is not None and row.of != digests.get(row.id)
            if (why := unusable(row, row.id in configs, is_changed)) is None:
                good.setdefault(row.id, []).append(row)
            else:
                self.drop(why, row.id)
        merged: dict[str, MeasuredRow] = {}
        met: set[bytes] = set()
        for id, config in configs.items():
            if id not in good:
                continue
            what = encode(msgspec.structs.replace(config, id="", guess_mib=0, shape=""))
            if contradict(good[id]):
                self.dropped.setdefault(AGAIN, []).extend([id] * len(good[id]))
            elif what in met:  # the same run to learn from and to evaluate on would be a leak
                self.drop(TWIN, id)
            else:
                met.add(what)
                merged[id] = merge(good[id])
        return merged

    def report(self, rows: int, kept: Sequence[MeasuredRow]) -> CleaningReport:
        return CleaningReport(
            rows=rows,
            kept=len(kept),
            oom=sum(row.oom for row in kept),
            dropped={why: len(ids) for why, ids in sorted(self.dropped.items())},
            examples={why: ids[0] for why, ids in sorted(self.dropped.items())},
        )


def unusable(row: MeasuredRow, is_known: bool, is_changed: bool) -> str | None:
    if not is_known:
        return UNKNOWN
    if is_changed:
        return CHANGED
    if row.error:
        return FAILED
    if not row.alone and (row.oom or row.retries):
        return CROWDED
    figures, activity = ([getattr(row, name) for name in names] for names in (_FIGURES.values(), _ACTIVITY))
    is_finite = all(value is None or math.isfinite(value) for value in (*activity, *figures))
    if not is_finite or (not row.oom and None in figures):
        return MISSING
    stepped = row.steps if row.stepped is None else row.stepped
    return SHORT if not row.oom and stepped < LEAST_STEPS else None


def contradict(rows: Sequence[MeasuredRow]) -> bool:
    if len({row.oom for row in rows}) > 1:
        return True
    figures = [_mib(row.footprint) or 0.0 for row in rows]
    return not rows[0].oom and max(figures) - min(figures) > max(APART_MIB, APART_SHARE * max(figures))


def merge(rows: Sequence[MeasuredRow]) -> MeasuredRow:
    """Memory of the first run, and activity of the last run that has it."""
    busy = next((row for row in reversed(rows) if row.step_ms is not None), None)
    if busy is None:
        return rows[0]
    return msgspec.structs.replace(rows[0], **{name: getattr(busy, name) for name in _ACTIVITY})


def read_measured(path: Path) -> Iterator[MeasuredRow | dict[str, Any]]:
    """Rows, and heads, which are lines without an id. An incomplete last line is ignored."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise Usage(f"{path} cannot be read: {error.strerror}", "`carma dataset collect` makes one.") from error
    for number, line in enumerate(text[: text.rfind(b"\n") + 1].splitlines(), 1):
        try:
            row = json.loads(line)  # accepts NaN, which is not JSON: such a row is counted, not an error
            yield msgspec.convert(row, MeasuredRow) if "id" in row else row
        except (ValueError, TypeError) as error:
            raise Usage(f"{path}, line {number}: {error}", "`carma dataset collect` makes such lines.") from error


def read_digests(path: Path) -> dict[str, str]:
    """Digest of each config's line in the file, by id; a row has the digest of its config's line."""
    return {config["id"]: config["of"] for config in read_configs(path)}


def _mib(size: float | None) -> float | None:
    return None if size is None else size / _MIB
