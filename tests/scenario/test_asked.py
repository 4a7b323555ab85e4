"""Scenarios of tasks that are asked to save a checkpoint and end, in the format of test_scenarios.py."""

from __future__ import annotations

import pytest

from tests.scenario.test_scenarios import play

SCENARIOS: dict[str, str] = {
    "a task that saves when it is asked goes on where its submission put it": """
        1 gpu
        submit A 30000 saves
        submit B 30000
        wait 25
        preempt A
        A on 0
        end A fail
        A on 0
        B waits Memory
        end A ok
        A ended succeeded
        B on 0
    """,
    "a task that does not leave when it is asked keeps its GPU": """
        1 gpu
        submit A 30000 saves
        submit B 30000
        wait 25
        preempt A
        wait 60
        A on 0
        B waits Memory
        end A fail
        A ended failed
        B on 0
    """,
    "with preemption the first task in the queue gets the GPU of a task of lower priority, which is queued again": """
        1 gpu preempting
        submit A 30000 saves priority=-5
        wait 130
        submit B 30000
        wait 59
        B waits Memory
        wait 2
        end A ok
        B on 0
        A waits Memory
        end B ok
        A on 0
        end A ok
        A ended succeeded
    """,
    "without preemption it waits for the end": """
        1 gpu
        submit A 30000 saves priority=-5
        wait 130
        submit B 30000
        wait 120
        end A ok
        A ended succeeded
        B on 0
    """,
}


@pytest.mark.parametrize("sentence", SCENARIOS)
def test_scenario(sentence: str) -> None:
    assert play(SCENARIOS[sentence]).log == play(SCENARIOS[sentence]).log
