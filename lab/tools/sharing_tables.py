"""Writes the errors of the sharing model into docs/simulation.md: `python -m lab.tools.sharing_tables`.

`--check` writes nothing and says whether the page is up to date. Figures come from lab/results/simulation/sharing.json.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tools.markdown import folded, placed, renew, table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "lab" / "results" / "simulation" / "sharing.json"
PAGE = ROOT / "docs" / "simulation.md"
TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
NUMBERS = {"2": "two", "3": "three", "4": "four"}
MECHANISMS = {"mps": "MPS", "timeslice": "slices"}
GAVEL = {
    "from_half_the_pairs": "demands from half of the pairs, judged on the other half",
    "from_own_pair": "demands from each job's pair with itself",
    "from_profiles": "demands from H200 profiles of the same models, scaled",
    "unknown": "nothing known of any job",
}
ONLINE = {
    "same_group": ("groups measured twice, by the model", "the same, after their first minute together"),
    "other_groups": ("any group, by the model", "the same, after other groups of its tasks"),
}


def forms(found: dict[str, Any]) -> str:
    """Mean errors of every form on tasks left out."""
    titles = (
        "mechanism",
        "form",
        "fitted on it",
        "task left out",
        *NUMBERS.values(),
        "p95",
        "signed",
        "family left out",
    )
    return table(titles, _forms(found))


def _forms(found: dict[str, Any]) -> Iterable[tuple[str, ...]]:
    for mechanism, called in MECHANISMS.items():
        kept = found[mechanism]["kept"]
        for name, form in found[mechanism]["forms"].items():
            out = form["left_out"]
            yield (
                called,
                f"**{name}**" if name == kept else name,
                _error(form["fit"]["all"]),
                _error(out["all"]),
                *(_error(out[size]) for size in NUMBERS),
                f"{out['all']['p95']:.3f}",
                f"{out['all']['signed']:+.3f}",
                _error(form["left_out_family"]),
            )


def band(found: dict[str, Any]) -> str:
    """Caution and spread."""
    rows = []
    for mechanism, called in MECHANISMS.items():
        of = found[mechanism]["of_the_cautious"]
        for number, word in NUMBERS.items():
            least, slope = of["spread"][number]
            rows.append(
                (
                    called,
                    word,
                    f"{100 * of['caution']['kept_to'][number]:.0f} %",
                    f"{100 * of['caution']['kept_to_where_guessed'][number]:.0f} %",
                    f"{least:.3f} + {slope:.3f} (1 - speed)" if slope >= 0.001 else f"{least:.3f}",
                )
            )
    return table(
        ("mechanism", "tasks", "at least the cautious speed", "the same, demands assumed", "spread of the log"), rows
    )


def online(found: dict[str, Any]) -> str:
    """Errors before and after what was observed corrects the model."""
    titles = ("judged", "engine activity, power", "speeds", "mean error", "p90", "at least the cautious speed")
    return table(titles, _online(found["online"]))


def _online(found: dict[str, Any]) -> Iterable[tuple[str, ...]]:
    for demands, replays in found.items():
        for key, (before, after) in ONLINE.items():
            one = replays[key]
            for what, errors in ((before, one["before"]), (after, one["after"])):
                kept = f"{100 * errors['kept_to_cautious']:.0f} %"
                yield what, demands, str(one["rates"]), _error(errors), f"{errors['p90']:.3f}", kept


def outside(found: dict[str, Any]) -> str:
    """Data that had no part in the fit."""
    titles = ("measured", "mechanism", "speeds", "mean error", "p95", "signed", "at least the cautious speed")
    return table(titles, _outside(found["validation"]))


def _outside(found: dict[str, Any]) -> Iterable[tuple[str, ...]]:
    for name, one in found["h200_collocation"].items():
        mechanism, task = name.split()
        yield f"H200, 2 to 8 copies of a {task} task", MECHANISMS[mechanism], *_judged(one)
    for key, what in GAVEL.items():
        for mechanism, called in MECHANISMS.items():
            yield f"Gavel, V100, pairs: {what}", called, *_judged(found["gavel_v100"][mechanism][key])
    for size, one in found["miso_a100"].items():
        yield f"MISO, A100, slices for {NUMBERS[size]} (MIG) beside copies that share", "MPS", *_judged(one)


def lucid(found: dict[str, Any]) -> str:
    """Published pairs by summed utilisation."""
    rows = found["validation"]["lucid"]
    spans = [f"{one['from']:g} to {min(2.0, one['to']):g}" for one in rows]
    predicted = [f"{one['predicted']:.2f}" for one in rows]
    published = [f"{one['published']:.2f}" for one in rows]
    return table(
        ("summed utilisation", *spans), [("published, RTX 3090", *published), ("the model, H200 tasks", *predicted)]
    )


def source(found: dict[str, Any]) -> str:
    twice = found["same_group_measured_twice"]
    return folded(
        TEXTS["source"].format(
            **{name: found[name] for name in ("date", "seed", "command")},
            **{f"{mechanism}_rates": found[mechanism]["rates"] for mechanism in MECHANISMS},
            twice=_error(twice),
            twice_rates=twice["rates"],
            single=f"{twice['mean_abs'] / 2**0.5:.3f}",
        )
    )


def band_notes(found: dict[str, Any]) -> str:
    cautions = {name: found[mechanism]["of_the_cautious"]["caution"] for mechanism, name in MECHANISMS.items()}
    predicted = [
        f"{100 * one['kept_to_by_a_band_made_without_the_task']:.0f} % ({name})" for name, one in cautions.items()
    ]
    prior = {name: f"{found['unknown'][name]:.2f}" for name in ("gr_active", "power", "sm_active")}
    return folded(TEXTS["band"].format(kept_to=" and ".join(predicted), tasks=found["unknown"]["tasks"], **prior))


def outside_notes(found: dict[str, Any]) -> str:
    of = found["validation"]
    predicted, was = of["h200_collocation"]["mps large"]["total_predicted_and_measured"]["8"]
    gavel = of["gavel_v100"]
    half = gavel["mps"]["from_half_the_pairs"]
    figures = {
        "most_off": f"{_most_off(of['h200_collocation']):.2f}",
        "eight_predicted": f"{predicted:.2f}",
        "eight_measured": f"{was:.2f}",
        "exactly_1": f"{100 * gavel['exactly_1']:.0f}",
        "half": _error(half),
        "sum_instead": _error(half["a_sum_instead"]),
        "ranks": " and ".join(
            f"{one['rank_correlation']:.2f} for {NUMBERS[size]}" for size, one in of["miso_a100"].items()
        ),
    }
    return "\n".join(folded(f"- {text.format(**figures)}", indent="  ") for text in TEXTS["outside"])


def _most_off(copies: dict[str, Any]) -> float:
    """Maximum error of the mean speed of two, three and four copies under MPS."""
    mps = [one["total_predicted_and_measured"] for name, one in copies.items() if name.startswith("mps ")]
    pairs = [(size, *totals[size]) for totals in mps for size in NUMBERS]
    return max(float(abs(predicted - was)) / int(size) for size, predicted, was in pairs)


MARKS = {
    "sharing source": source,
    "sharing forms": forms,
    "sharing band": band,
    "sharing band notes": band_notes,
    "sharing online": online,
    "sharing outside": outside,
    "sharing outside notes": outside_notes,
    "sharing lucid": lucid,
}


def _error(one: dict[str, float]) -> str:
    return f"{one['mean_abs']:.3f}"


def _judged(one: dict[str, float]) -> tuple[str, ...]:
    shown = (f"{one['mean_abs']:.3f}", f"{one['p95']:.3f}", f"{one['signed']:+.3f}")
    return str(one["rates"]), *shown, f"{100 * one['kept_to_cautious']:.0f} %"


def pages() -> dict[Path, str]:
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    return placed((PAGE, mark, make(found).rstrip() + "\n") for mark, make in MARKS.items())


if __name__ == "__main__":
    sys.exit(renew("lab.tools.sharing_tables", __doc__, sys.argv[1:], pages))
