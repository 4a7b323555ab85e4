"""README.md beside the file: its tables, made from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from carma_lab.bench.paper.claims import GOODPUT, NO_CAP, band, kept
from carma_lab.bench.paper.published import OF_ALL
from carma_lab.bench.paper.variants import PARTS
from carma_lab.reports.figure_list import figure, table
from gpumemnet.directories import write_whole

COLUMNS = ("makespan", "completion", "completion_p95", "wait", "run", "slowdown", "energy")
TITLES = ("makespan", "completion", "p95", "wait", "run", "slowdown", "energy", "OOMs", "failed")
AT_CAP = (
    " *The limit at cap …* is the limit of runs in which no task exceeds this slowdown, which goodput promises; "
    "\\* a task exceeded it, so the limit does not apply to that run."
)


def tables(part: Any) -> list[str]:
    groups: dict[str, list[Any]] = {}
    for one in part["variants"]:
        groups.setdefault(one["group"], []).append(one)
    lines = ["## Tables\n", f"{part['tasks']} tasks on {part['gpus']} GPUs; geometric means over the traces.\n"]
    if "published" in groups:
        lines += [
            "### Compared with the published figures\n",
            "As near to the published rules as settings go: in the strict order of arrival, as many on a GPU as fit. "
            "*Ours / published*.\n",
            _beside(groups["published"]),
            OF_ALL + "\n",
        ]
    titles = {
        "baselines": "### Baselines, with this project's queue",
        "ours": "### Ours",
        "ablations": "### Ablations: gate and recovery",
        "more": "### Other sources of memory and demand, and time slices",
    }
    for group, title in titles.items():
        if group in groups:
            lines += [title + "\n", _variants(groups[group])]
    return [*lines, "![Bars](paper-bars.png)\n"]


def _beside(rows: Sequence[Any]) -> str:
    fields = ("makespan", "completion", "completion_p95", "wait", "run", "energy")
    titles = ("variant", "makespan", "completion", "p95", "wait", "run", "energy", "OOMs", "where ours differ, why")
    return table(
        titles, [(one["name"], *(_pair(one, name) for name in fields), _ooms(one), one["why"]) for one in rows]
    )


def _pair(one: Any, field: str) -> str:
    theirs = one["published"][field]
    return figure(one["mean"][field], 3) + (f" / {theirs:.3f}" if theirs is not None else "")


def _ooms(one: Any) -> str:
    theirs = one["published"]["ooms"]
    return f"{one['mean']['ooms']}" + (f" / {theirs}" if theirs is not None else "")


def _variants(rows: Sequence[Any]) -> str:
    traces = list(rows[0]["traces"])
    lines = [
        (
            f"{one['name']} ({one['about']})" if one["about"] else one["name"],
            *(figure(one["traces"][name]["makespan"], 2) for name in traces),
            *(figure(one["mean"][name]) for name in COLUMNS),
            *(str(one["mean"][name]) for name in ("ooms", "failed")),
        )
        for one in rows
    ]
    return table(("variant", *(f"`{name}`" for name in traces), *TITLES), lines)


def curves(part: Any) -> list[str]:
    # An older file has one bound for all caps.
    of_each_cap = all("bound" in point for one in part["traces"].values() for point in one["curve"])
    limit = "in brackets the limit of the makespan if no task exceeds the cap"
    bound = limit if of_each_cap else "the bound is a makespan"
    return [
        "## Curve over the slowdown cap\n",
        f"goodput, {part['gpus']} GPUs. Each cell: makespan, mean run time; {bound}.\n",
        _curve_table(part),
        "Whether the curve (caps 1.1 to 2) lies below each baseline's point: a lower makespan at no more run time. "
        "*Left*: the point lies left of it. Each cap is one run, and the curve jumps: several caps are held against "
        "one run of each baseline, which is in goodput's favour.\n",
        _below_table(part),
        "![Curves](paper-curves.png)\n",
    ]


def _curve_table(part: Any) -> str:
    traces = part["traces"]
    caps = [point["cap"] for point in next(iter(traces.values()))["curve"]]
    rows = [
        ("none" if cap is None else f"{cap:g}", *(_capped_cell(one["curve"][place]) for one in traces.values()))
        for place, cap in enumerate(caps)
    ]
    rows.append(("the limit", *(figure(one["bound"]) for one in traces.values())))
    return table(("cap", *(f"`{name}`" for name in traces)), rows)


def _cell(point: Mapping[str, Any]) -> str:
    return f"{point['makespan']:.3f}, {point['run']:.2f}" + (f", {point['ooms']} OOMs" if point["ooms"] else "")


def _capped_cell(point: Mapping[str, Any]) -> str:
    return _cell(point) + (f" ({point['bound']:.3f})" if "bound" in point else "")  # older files do not have it


def _below_table(part: Any) -> str:
    traces = part["traces"]
    words = {True: "below", False: "**not**", None: "left"}
    names = list(next(iter(traces.values()))["points"])
    rows = [
        (name, *(f"{_cell(one['points'][name])}: {words[one['below'][name]]}" for one in traces.values()))
        for name in names
    ]
    return table(("point", *(f"`{name}`" for name in traces)), rows)


def limits(part: Any) -> list[str]:
    return [
        "## The limit\n",
        "Makespan as a part of that of exclusive GPUs; in brackets how many times the limit. *Arrivals* is the part of "
        f"the limit that arrivals alone make.{AT_CAP if _has_capped(part['rows']) else ''} *Completion*: mean "
        "completion, of exclusive GPUs and of the limit.\n",
        _limit_table(part["rows"]),
    ]


def _limit_table(rows: Sequence[Any]) -> str:
    def line(title: str, cell: Callable[[Any], str]) -> tuple[str, ...]:
        return (title, *map(cell, rows))

    def over_bound(name: str) -> Callable[[Any], str]:
        return lambda row: f"{row['policies'][name]['makespan']:.3f} ({row['policies'][name]['over_bound']:.2f})"

    def completion(name: str) -> Callable[[Any], str]:
        return lambda row: figure(row["policies"][name]["completion"])

    everywhere = [name for name in rows[0]["policies"] if all(name in row["policies"] for row in rows)]
    lines = [
        line("arrivals", lambda row: figure(row["arrivals"])),
        line("**the limit**", lambda row: figure(row["bound"])),
        *_capped_lines(rows),
        *(line(name, over_bound(name)) for name in everywhere),
        *(line(f"completion: {name}", completion(name)) for name in (GOODPUT, NO_CAP)),
        line("completion: the limit", lambda row: figure(row["completion_bound"])),
    ]
    return table(("", *(f"`{row['trace']}`, {row['gpus']}" for row in rows)), lines)


def _has_capped(rows: Sequence[Any]) -> bool:
    """Older files do not have it."""
    return all("capped" in row for row in rows)


def _capped_lines(rows: Sequence[Any]) -> list[tuple[str, ...]]:
    if not _has_capped(rows):
        return []
    capped = [row["capped"] for row in rows]
    cap = f"{capped[0]['cap']:g}"
    over = [f"{one['over_bound']:.2f}" + ("" if kept(one) else " \\*") for one in capped]
    return [
        (f"**the limit at cap {cap}**", *(figure(one["bound"]) for one in capped)),
        (f"goodput, times the limit at cap {cap}", *over),
    ]


def seeds(part: Any) -> list[str]:
    lines = ["## Seeds\n", f"{part['seeds']} seeds, true rates spread as measured (`--noise {part['noise']:g}`). "
            "Makespan: mean (p5 to p95); then mean slowdown; OOMs in all seeds.\n"]  # fmt: skip
    for group in part["groups"]:
        rows = [
            (name, *(band(one["traces"][trace]["makespan"]) for trace in group["traces"]),
             band(one["mean"]["makespan"]), band(one["mean"]["slowdown"]), str(one["mean"]["ooms"]))
            for name, one in group["variants"].items()
        ]  # fmt: skip
        titles = ("variant", *(f"`{name}`" for name in group["traces"]), "all", "slowdown", "OOMs")
        lines += [f"### {group['gpus']} GPUs\n", table(titles, rows)]
    return [*lines, "![Bands](paper-seeds.png)\n"]


def philly(part: Any) -> list[str]:
    lines = ["## Philly\n", f"{part['windows']} windows of the public trace, each at a rate at which work comes "
            f"{part['load']:g} times as fast as the GPUs do it one task each.\n"]  # fmt: skip
    for size in part["sizes"]:
        lines += [f"### {size['gpus']} GPUs, {size['tasks']} tasks each\n", _limit_table(size["rows"])]
    if "curves" in part:
        lines += ["### Curve over the slowdown cap\n", _curve_table(part["curves"]), _below_table(part["curves"])]
    return [*lines, "![Windows](paper-philly.png)\n"]


def speed(part: Any) -> list[str]:
    low, high = part["published_tasks_per_s"]
    traces = [(f"load {one['load']:g}", one) for one in part["rates"]]
    traces += [("Philly", one) for one in part.get("philly", ())]
    rows = [
        (one["variant"], f"{one['tasks']:,}", trace, f"{one['tasks_per_s']:,.0f}", _done(one)) for trace, one in traces
    ]
    decisions = [(one["name"], f"{one['value']:.2f} {one['unit']}", one["how"]) for one in part["decisions"]]
    return [
        "## Speed\n",
        f"64 GPUs, one core, processor time. Published simulators do {low:g} to {high:g} tasks a second.\n",
        table(("variant", "tasks", "trace", "tasks a second", ""), rows),
        "### A decision as the server grows\n",
        table(("case", "median", "how"), decisions),
    ]


def _done(one: Mapping[str, Any]) -> str:
    return f"{one['took_s']:.1f} s" if one["whole"] else f"broken off after {one['took_s']:.0f} s, {one['done']:,} done"


MAKERS: dict[str, Callable[[Any], list[str]]] = {
    "tables": tables, "curves": curves, "limits": limits, "seeds": seeds, "philly": philly, "speed": speed,
}  # fmt: skip


NAME = "README.md"
HEAD = Path(__file__).with_name("page_head.txt").read_text(encoding="utf-8")
VERDICTS = {True: "met", False: "**not met**", None: "not run"}


def write(out: Path, found: Mapping[str, Any]) -> Path:
    path = out / NAME
    write_whole(path, text(found).encode())
    return path


def text(found: Mapping[str, Any]) -> str:
    parts = found["parts"]
    lines = [HEAD]
    if found["quick"]:
        lines.append("**A quick run**: few cases, to see that it works. No figure here means much.\n")
    aims = [(one["aim"], one["found"], VERDICTS[one["met"]]) for one in found["claims"]]
    lines += [_made(parts), *_mixed(parts), "## Aims\n", table(("aim", "found", ""), aims)]
    for part in PARTS:
        if part in parts:
            lines += MAKERS[part](parts[part])
    return "\n".join(lines)


def _made(parts: Mapping[str, Any]) -> str:
    rows = (
        (f"`{name}`", about["date"], f"`{about['command']}`", f"{about['took_s']:.0f} s", about["cpu"],
         f"{about['load_before']:g}", f"CARMA {about['carma']}, Python {about['python']}", str(about["seed"]),
         about["code"] + (" **and later**" if about["code_changed"] else ""))
        for name, part in parts.items()
        for about in [part["about"]]
    )  # fmt: skip
    return table(("part", "date", "command", "took", "machine", "load before", "versions", "seed", "code"), rows)


def _mixed(parts: Mapping[str, Any]) -> list[str]:
    codes = {part["about"]["code"] for part in parts.values()}
    if len(codes) <= 1 and not any(part["about"]["code_changed"] for part in parts.values()):
        return []
    return ["**These parts are not of one version of the code**: they are not to be compared with each other.\n"]
