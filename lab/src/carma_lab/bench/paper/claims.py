"""The aims of the study, the results, and whether each aim is met: computed from the file, never typed.

A claim whose part was not run has `met` None, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from carma.core.model.values import Record
from carma_lab.bench.paper.cases import geo_mean
from carma_lab.bench.paper.published import ARRIVALS, ENERGY, NEAR, PUBLISHED, RUN
from carma_lab.bench.paper.variants import FEW_GPUS, LARGE

MAKESPAN, SLOWDOWN, MAKESPAN_NO_CAP, NEAR_BOUND = 0.70, 1.3, 0.66, 1.10
TASKS_PER_S, WHOLE_S = 400.0, 60.0
SAME = 0.01  # of the makespan of exclusive GPUs: figures that are given with two digits
SLACK = 0.01  # of a slowdown: the start of the process is in it, and is no part of a run alone
GOODPUT, NO_CAP = "goodput", "goodput, no cap"
Parts = Mapping[str, Any]


class Claim(Record, frozen=True):
    part: str
    aim: str
    found: str
    met: bool | None  # None: not run


def claims(parts: Parts) -> list[Claim]:
    """Claims of the parts in the file; the other parts are named as not run."""
    makers: dict[str, Callable[[Any], Iterator[Claim]]] = {
        "tables": _tables, "curves": _curves, "limits": _limits, "seeds": _seeds, "philly": _philly, "speed": _speed,
    }  # fmt: skip
    found: list[Claim] = []
    for part, make in makers.items():
        if part in parts:
            found += make(parts[part])
        else:
            found.append(Claim(part, f"all aims of the part {part}", "not run", None))
    return found


def _tables(part: Any) -> Iterator[Claim]:
    mean = {(one["group"], one["name"]): one["mean"] for one in part["variants"]}
    rows = [one for one in part["variants"] if "published" in one]
    if rows:
        off = {one["name"]: one["off"]["makespan"] for one in rows}
        near = [name for name, by in off.items() if abs(by) <= NEAR]
        worst = max(off, key=lambda name: abs(off[name]))
        yield Claim(
            "tables", f"published makespans within {NEAR:g}",
            f"{len(near)} of {len(off)}; furthest: {worst}, {off[worst]:+.3f}", len(near) == len(off),
        )  # fmt: skip
        runs = [mean["published", name]["run"] for name in PUBLISHED if name.startswith("MAGM") and "gate" not in name]
        yield Claim("tables", f"MAGM's mean run time {RUN[0]} to {RUN[1]} times", f"{min(runs):.2f} to {max(runs):.2f}",
                     RUN[0] <= min(runs) and max(runs) <= RUN[1])  # fmt: skip
        energy = mean["published", "MAGM, no estimate"]["energy"]
        yield Claim("tables", "MAGM's energy 12 to 15 % less than exclusive GPUs'", f"{100 * (energy - 1):+.1f} %",
                     ENERGY[0] <= energy <= ENERGY[1])  # fmt: skip
    goodput = mean["ours", GOODPUT]
    yield _at_most("tables", "goodput's makespan, geometric mean", goodput["makespan"], MAKESPAN)
    yield _at_most("tables", "goodput's mean slowdown", goodput["slowdown"], SLOWDOWN)
    yield Claim("tables", "goodput: no OOM", str(goodput["ooms"]), goodput["ooms"] == 0)
    for (group, name), one in mean.items():
        if group == "ours" and name.startswith(f"{GOODPUT}, "):
            yield _at_most("tables", f"the same where less is known: {name}: makespan", one["makespan"], MAKESPAN)


def _curves(part: Any) -> Iterator[Claim]:
    yield from _curve_claims("curves", part)
    uncapped = [point for one in part["traces"].values() for point in one["curve"] if point["cap"] is None]
    mean = geo_mean([point["makespan"] for point in uncapped])
    if mean is not None:
        yield _at_most("curves", "goodput's makespan without a cap, geometric mean", mean, MAKESPAN_NO_CAP)


def _curve_claims(part: str, curves: Any) -> Iterator[Claim]:
    verdicts = [
        (trace, name, is_below) for trace, one in curves["traces"].items() for name, is_below in one["below"].items()
    ]
    above = [f"{name} on {trace}" for trace, name, is_below in verdicts if is_below is False]
    left = [f"{name} on {trace}" for trace, name, is_below in verdicts if is_below is None]
    result = f"below {len(verdicts) - len(above) - len(left)} of {len(verdicts)} points"
    result += f"; not below: {_few(above)}" if above else ""
    result += f"; left of the curve: {_few(left)}" if left else ""
    yield Claim(part, "goodput's curve (caps 1.1 to 2) lies below every baseline's point on each trace", result,
                 not above and not left)  # fmt: skip


def _limits(part: Any) -> Iterator[Claim]:
    few = [row for row in part["rows"] if row["gpus"] == FEW_GPUS]
    result = {row["trace"]: row["arrivals"] for row in few if row["trace"] in ARRIVALS}
    aims = _named({name: ARRIVALS[name] for name in result}, 2)
    yield Claim("limits", f"the bound by arrivals alone, 4 GPUs, within {SAME:g} of {aims}", _named(result, 3),
                 all(abs(value - ARRIVALS[name]) <= SAME for name, value in result.items()))  # fmt: skip
    for name in (GOODPUT, NO_CAP):
        for gpus in sorted({row["gpus"] for row in part["rows"]}):
            yield from _near_bound("limits", name, gpus, [row for row in part["rows"] if row["gpus"] == gpus])
    yield from _ahead("limits", part["rows"])


def _near_bound(part: str, name: str, gpus: int, rows: Sequence[Any]) -> Iterator[Claim]:
    over = {row["trace"]: row["policies"][name]["over_bound"] for row in rows}
    yield _within(part, f"{name} within 10 % of the limit on {gpus} GPUs", over)
    if name == GOODPUT and all("capped" in row for row in rows):  # older files do not have it
        capped = {row["trace"]: row["capped"] for row in rows}
        broken = {trace: one["slowdown_max"] for trace, one in capped.items() if not kept(one)}
        aim = f"{name} within 10 % of the limit at its cap, {rows[0]['capped']['cap']:g}, on {gpus} GPUs"
        more = f"; the cap was not kept on {_named(broken, 2)}" if broken else ""
        over = {trace: one["over_bound"] for trace, one in capped.items()}
        yield _within(part, aim, over, broken, more)


def kept(capped: Any) -> bool:
    """Whether every slowdown is below the cap. Otherwise the limit at the cap is no limit of that run."""
    return bool(capped["slowdown_max"] is None or capped["slowdown_max"] <= capped["cap"] + SLACK)


def _within(
    part: str, aim: str, over: Mapping[str, float], broken: Mapping[str, float] | None = None, more: str = ""
) -> Claim:
    """`broken`: those that cannot be judged by it, and so are not within."""
    worst = max(over, key=lambda trace: over[trace])
    within = sum(value <= NEAR_BOUND and trace not in (broken or ()) for trace, value in over.items())
    result = f"{within} of {len(over)}; furthest: {worst}, {over[worst]:.2f} times"
    return Claim(part, aim, result + more, within == len(over))


def _ahead(part: str, rows: Sequence[Any]) -> Iterator[Claim]:
    for field, words in (("completion", "mean"), ("completion_p95", "p95")):
        behind = [
            f"{name} on {row['trace']}, {row['gpus']} GPUs"
            for row in rows
            for name, one in row["policies"].items()
            if name not in (GOODPUT, NO_CAP) and one[field] <= row["policies"][GOODPUT][field]
        ]
        count = sum(name not in (GOODPUT, NO_CAP) for row in rows for name in row["policies"])
        result = f"ahead in {count - len(behind)} of {count}" + (f"; behind: {_few(behind)}" if behind else "")
        yield Claim(part, f"goodput ahead of every baseline on {words} completion", result, not behind)


def _seeds(part: Any) -> Iterator[Claim]:
    for group in part["groups"]:
        mean = group["variants"][GOODPUT]["mean"]
        where = f"{group['gpus']} GPUs, {part['seeds']} seeds"
        result = f"{band(mean['makespan'])}, OOMs {mean['ooms']}"
        if group["gpus"] == FEW_GPUS:
            yield Claim("seeds", f"goodput's makespan at most {MAKESPAN:g} at p95: {where}", result,
                         mean["makespan"]["p95"] <= MAKESPAN)  # fmt: skip
            yield Claim("seeds", f"goodput's mean slowdown at most {SLOWDOWN:g} at p95: {where}",
                         band(mean["slowdown"]), mean["slowdown"]["p95"] <= SLOWDOWN)  # fmt: skip
        yield Claim("seeds", f"goodput: no OOM with noise: {where}", result, mean["ooms"] == 0)


def _philly(part: Any) -> Iterator[Claim]:
    for size in part["sizes"]:
        where = f"{size['gpus']} GPUs"
        rows = size["rows"]
        for name, aim in ((GOODPUT, MAKESPAN), (NO_CAP, MAKESPAN_NO_CAP)):
            mean = geo_mean([row["policies"][name]["makespan"] for row in rows])
            if mean is not None:
                yield _at_most("philly", f"{name}: makespan, geometric mean of the windows, {where}", mean, aim)
        slowdown = geo_mean([row["policies"][GOODPUT]["slowdown"] for row in rows])
        if slowdown is not None:
            yield _at_most("philly", f"goodput's mean slowdown, {where}", slowdown, SLOWDOWN)
        ooms = sum(row["policies"][GOODPUT]["ooms"] for row in rows)
        yield Claim("philly", f"goodput: no OOM, {where}", str(ooms), ooms == 0)
        for name in (GOODPUT, NO_CAP):
            yield from _near_bound("philly", name, size["gpus"], rows)
        yield from _ahead("philly", rows)
    if "curves" in part:
        yield from _curve_claims("philly", part["curves"])


def _speed(part: Any) -> Iterator[Claim]:
    for rate in part["rates"]:
        aim = f"{TASKS_PER_S:,.0f} simulated tasks a second, {LARGE} GPUs, load {rate['load']:g}: {rate['variant']}"
        yield Claim("speed", aim, f"{rate['tasks_per_s']:,.0f}", rate["tasks_per_s"] >= TASKS_PER_S)
    if "philly" not in part:
        yield Claim("speed", f"the whole Philly trace within {WHOLE_S:g} s", "not run", None)
    for whole in part.get("philly", ()):
        result = f"{whole['took_s']:.0f} s" if whole["whole"] else f"{whole['done']:,} tasks in {whole['took_s']:.0f} s"
        yield Claim("speed", f"the Philly trace, {whole['tasks']:,} tasks, within {WHOLE_S:g} s: {whole['variant']}",
                     result, whole["whole"] and whole["took_s"] <= WHOLE_S)  # fmt: skip


def _at_most(part: str, what: str, value: float, most: float) -> Claim:
    return Claim(part, f"{what} at most {most:g}", f"{value:.3f}", value <= most)


def band(band: Mapping[str, float]) -> str:
    return f"{band['mean']:.3f} ({band['p05']:.3f} to {band['p95']:.3f})"


def _few(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _named(values: Mapping[str, float], digits: int) -> str:
    return ", ".join(f"{name} {value:.{digits}f}" for name, value in values.items())
