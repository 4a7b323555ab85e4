"""What a simulation would not heed is refused, with the flag that is meant."""

from __future__ import annotations

import pytest

from carma.config import catalogue
from carma.errors import BadSettings, Usage
from carma.sim.given import WITHOUT_EFFECT
from carma.sim.request import Request, simulation
from tests.unit.sim_made import row, trace


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("sharing.mechanism", "timeslice", "--mechanism"),
        ("placement.policy", "lug", "--policy"),
        ("memory.sources", "history", "--memory"),
        ("window.stale_s", "1", "stale"),
        ("queue.misfits", "wait", "is ended there"),
        ("quota.waiting", "1", "at the submission"),
        ("virtual.gpus", "8", "--gpus and --gpu"),
        ("daemon.log_level", "debug", "daemon only"),
    ],
)
def test_a_setting_without_effect_is_refused(name: str, value: str, said: str) -> None:
    with pytest.raises(BadSettings, match=rf"^{name} has no effect in the simulator: .*{said}"):
        simulation(Request(settings={name: value}))


def test_each_of_them_is_a_setting() -> None:
    names = set(catalogue())
    assert set(WITHOUT_EFFECT) <= names | {name.partition(".")[0] for name in names}


def test_settings_with_an_effect_are_taken() -> None:
    assert simulation(Request(settings={"placement.gpus": "0,1", "gate.enabled": "no"})).rules.gate.enabled is False


def test_a_source_that_knows_no_task_of_the_trace_is_refused() -> None:
    with pytest.raises(Usage, match=r"no task of made\.csv has an estimate by horus \(column horus_mib\)"):
        simulation(Request(memory="horus"), trace(row(), row()))
    assert simulation(Request(memory="horus"), trace(row(), row(horus_mib=5_000)))


def test_a_task_that_is_too_large_is_told_which_cards_hold_it() -> None:
    with pytest.raises(Usage) as told:
        simulation(Request(), trace(row(memory_mib=60_000)))
    assert told.value.hint.startswith("Simulate a larger card (--gpu a100-80 or --gpu h200)")
    with pytest.raises(Usage) as told:
        simulation(Request(), trace(row(memory_mib=600_000)))
    assert told.value.hint.startswith("No card holds it")
