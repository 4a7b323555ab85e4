"""What the pages say of the simulator's errors, and of what was gained on a card, is in the files of results."""

from __future__ import annotations

import copy

import pytest

from carma_lab.runs.record import read
from carma_lab.simulator.fidelity import fidelity, known_from
from lab.tools import fidelity_tables
from lab.tools.fidelity_tables import CARD, CARD_ROWS, VIRTUAL, VIRTUAL_ROWS

EACH = {"virtual": (VIRTUAL, VIRTUAL_ROWS), "card": (CARD, CARD_ROWS)}


def test_the_pages_are_up_to_date() -> None:
    for page, text in fidelity_tables.pages().items():
        assert page.read_text(encoding="utf-8") == text, "python -m lab.tools.fidelity_tables"


def test_a_figure_that_changes_in_a_file_changes_on_the_page() -> None:
    found = fidelity_tables.results(VIRTUAL, VIRTUAL_ROWS)
    other = copy.deepcopy(found)
    other["magm"]["task_median"] += 0.5
    assert fidelity_tables.judged(found, VIRTUAL_ROWS) != fidelity_tables.judged(other, VIRTUAL_ROWS)


def test_slowdowns_are_those_of_runs_against_the_same_tasks_alone() -> None:
    runs = fidelity_tables.recorded()
    assert set(fidelity_tables.slowdowns(runs["exclusive"], runs["exclusive"])) == {1.0}
    longer = copy.deepcopy(runs["exclusive"])
    last = longer["tasks"][0]["attempts"][-1]
    last["ended_at"] += last["ended_at"] - last["started_at"]
    assert max(fidelity_tables.slowdowns(longer, runs["exclusive"])) == pytest.approx(2.0)


def test_the_aims_were_met_on_virtual_gpus() -> None:
    found = fidelity_tables.results(VIRTUAL, VIRTUAL_ROWS)
    assert {name: one["met"] for name, one in found.items()} == dict.fromkeys(VIRTUAL_ROWS, True)


@pytest.mark.parametrize("where", EACH)
def test_the_exclusive_run_is_still_simulated_within_the_aims(where: str) -> None:
    """Its order hangs on no gate and no score: whatever becomes of the policies, this one stays."""
    folder, _ = EACH[where]
    assert fidelity(read(folder / "run-exclusive.json")).met


@pytest.mark.parametrize("where", EACH)
def test_every_other_run_can_still_be_simulated(where: str) -> None:
    folder, words = EACH[where]
    known = known_from(folder / "run-exclusive.json")
    names = [name for name in words if not name.endswith("-solo") and name != "exclusive"]
    assert names
    for name in names:
        run = read(folder / f"run-{name}.json")
        assert fidelity(run, known).solo == {"given": len(run.tasks)}
