"""What the page says of the schedulers and rules that were published is in the file of results."""

from __future__ import annotations

import json

import pytest

from carma.config import settings_of
from carma.plugins import POLICIES, names
from carma.sim import sources
from tools import baselines


def test_the_page_is_up_to_date() -> None:
    for page, text in baselines.pages().items():
        assert page.read_text(encoding="utf-8") == text, "python -m tools.baselines --page"


def test_a_figure_that_changes_in_the_file_changes_on_the_page() -> None:
    found = json.loads(baselines.RESULTS.read_text(encoding="utf-8"))
    before = baselines.shown(found)
    found["variants"][0]["traces"]["t1"]["ooms"] += 7
    assert baselines.shown(found) != before


def test_the_file_has_the_variants_of_the_tool() -> None:
    found = json.loads(baselines.RESULTS.read_text(encoding="utf-8"))
    told = [(one["name"], one["options"]) for one in found["variants"]]
    assert told == [(one.name, dict(one.options)) for one in baselines.VARIANTS], "python -m tools.baselines"


@pytest.mark.parametrize("one", baselines.VARIANTS, ids=lambda one: one.name)
def test_every_variant_can_be_simulated(one: baselines.Variant) -> None:
    assert one.options["policy"] in names(POLICIES)
    assert one.options.get("memory", "measured") in sources.NAMES
    settings_of(dict(one.options.get("settings", {})))


def test_the_published_gates_are_told_apart() -> None:
    told = [settings_of(dict(caps)).rules.gate for caps in (baselines.CARMA, baselines.AEGIS, baselines.CAREFUL)]
    assert [(gate.sm_active, gate.sm_occupancy, gate.dram_active, gate.combine) for gate in told] == [
        (0.8, 0.45, 0.4, "published"),
        (0.65, 0.35, 0.5, "published"),
        (0.5, 0.2, 0.4, "published"),
    ]
