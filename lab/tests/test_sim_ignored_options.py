"""An option that a simulation would ignore is refused, with the option to use instead."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from carma.cli import carma
from carma.config import catalogue
from carma.core.telemetry.inferred_activity import source_of
from carma.errors import BadSettings, Usage
from carma.trial.cards import find_card
from carma_lab.simulator import simulated_cards as cards
from carma_lab.simulator.request import WITHOUT_EFFECT, Request, recorded, simulation
from lab_fixtures.small_simulations import row, trace


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("sharing.mechanism", "timeslice", "--mechanism"),
        ("placement.policy", "lug", "--policy"),
        ("memory.sources", "history", "--memory"),
        ("window.stale_s", "1", "stale"),
        ("queue.misfits", "wait", "is ended"),
        ("quota.waiting", "1", "it limits submissions"),
        ("virtual.gpus", "8", "--gpus and --gpu"),
        ("daemon.log_level", "debug", "daemon only"),
        ("monitor.period_s", "2", "five seconds apart"),
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


def test_inferred_activity_can_be_simulated() -> None:
    made = simulation(Request(settings={"monitor.sm_activity": "inferred"}))
    made.run()
    sources = {source_of(gpu, made.state.live[gpu.id].window.newest) for gpu in made.state.gpus.values()}
    assert sources == {"inferred"}


def test_a_source_that_knows_no_task_of_the_trace_is_refused() -> None:
    with pytest.raises(Usage, match=r"made\.csv .*horus_mib"):
        simulation(Request(memory="horus"), trace(row(), row()))
    assert simulation(Request(memory="horus"), trace(row(), row(horus_mib=5_000)))


def test_the_error_about_a_too_large_task_names_the_cards_that_fit_it() -> None:
    with pytest.raises(Usage) as told:
        simulation(Request(), trace(row(memory_mib=60_000)))
    assert told.value.hint.startswith("Simulate a larger card (--gpu a100-80 or --gpu h200)")
    with pytest.raises(Usage) as told:
        simulation(Request(), trace(row(memory_mib=600_000)))
    assert told.value.hint.startswith("No card is large enough")


@pytest.mark.parametrize("name", ["a100-40", "a100-40gb", "A100-40GB", "NVIDIA A100-SXM4-40GB"])
def test_a_card_has_the_spellings_of_estimates(name: str) -> None:
    assert cards.find(name) is cards.CARDS["a100-40"]


def test_every_card_is_one_of_estimates_too() -> None:
    assert {name: card.name for name, card in cards.CARDS.items()} == {
        name: getattr(find_card(name), "name", None) for name in cards.CARDS
    }


def test_a_card_that_is_not_known_has_a_neighbour() -> None:
    with pytest.raises(Usage, match="no such card") as told:
        cards.find("h20")
    assert told.value.hint.startswith("Did you mean h200?")
    with pytest.raises(Usage, match="NVIDIA B200"):
        cards.find("b200")


def test_a_run_knows_its_trace_by_its_tasks() -> None:
    one, same, other = (trace(row(seconds=seconds)) for seconds in (60.0, 60.0, 61.0))
    told = [recorded(Request(trace="made"), each).about.tasks for each in (one, same, other)]
    assert told[0] == told[1] != told[2]
    assert len(told[0]) == 16


def test_tasks_that_failed_come_first_in_the_table() -> None:
    words = ["simulate", "--trace", "t1", "--memory", "none", "--set", "gate.enabled=no"]
    failing = [word for name in ("retries", "innocent_retries") for word in ("--set", f"recovery.{name}=0")]
    _, _, first, *_ = CliRunner().invoke(carma, [*words, *failing]).stdout.splitlines()
    assert first.split()[:2] == ["FAILED", "TASKS"]
    assert "FAILED" not in CliRunner().invoke(carma, words).stdout


def test_the_table_says_which_card_a_short_name_stands_for() -> None:
    heading, *_ = (
        CliRunner().invoke(carma, ["simulate", "--trace", "t1", "--gpu", "a100", "--gpus", "2"]).stdout.split("\n")
    )
    assert heading == "t1: 60 tasks on 2 x NVIDIA A100-SXM4-80GB, mps"
