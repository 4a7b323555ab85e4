"""What the page says of the simulator's errors is in the files of results."""

from __future__ import annotations

import copy

from carma.sim.fidelity import fidelity, known_from
from carma.sim.record import read
from tools import fidelity_tables
from tools.fidelity_tables import RESULTS, ROWS


def test_the_page_is_up_to_date() -> None:
    for page, text in fidelity_tables.pages().items():
        assert page.read_text(encoding="utf-8") == text, "python -m tools.fidelity_tables"


def test_a_figure_that_changes_in_a_file_changes_on_the_page() -> None:
    found = fidelity_tables.results()
    other = copy.deepcopy(found)
    other["fidelity-magm"]["task_median"] += 0.5
    assert fidelity_tables.judged(found) != fidelity_tables.judged(other)


def test_the_aims_were_met() -> None:
    assert {name: one["met"] for name, one in fidelity_tables.results().items()} == dict.fromkeys(ROWS, True)


def test_the_exclusive_run_is_still_simulated_within_the_aims() -> None:
    """Its order hangs on no gate and no score: whatever becomes of the policies, this one stays."""
    assert fidelity(read(RESULTS / "run-exclusive.json")).met


def test_every_other_run_can_still_be_simulated() -> None:
    known = known_from(RESULTS / "run-exclusive.json")
    for name in ("run-magm", "run-unknown"):
        assert fidelity(read(RESULTS / f"{name}.json"), known).solo == {"given": 24}
