"""The table of joint choices: its page, its prices, and that a joint choice changes who goes first."""

from __future__ import annotations

from carma.core.model.values import Demand
from lab.tools import look_ahead
from lab.tools.policy_evaluation import Case, run

LIGHT, HEAVY = Demand(0.1, 0.05, 0.05), Demand(0.95, 0.5, 0.6)


def test_the_page_is_as_in_the_file() -> None:
    for page, text in look_ahead.pages().items():
        assert page.read_text(encoding="utf-8") == text, "run python -m lab.tools.look_ahead --tables"


def test_a_light_task_needs_less_of_a_gpu_than_a_heavy_one() -> None:
    assert 1.0 / look_ahead.COPIES <= look_ahead.price(LIGHT) < 0.3 < 0.7 < look_ahead.price(HEAVY) <= 1.0


def test_a_window_of_one_task_decides_as_the_shipped_pass_and_a_larger_one_does_not() -> None:
    case = Case("t1", 0.0)
    shipped = run(case, look_ahead.KNOWN)
    found = []
    for window in (1, 8):
        with look_ahead.looking_ahead(look_ahead.Form(window, 0.0, True)):
            found.append(run(case, look_ahead.KNOWN).completion_mean_s)
    assert found[0] == shipped.completion_mean_s != found[1]
