"""Reasons for a column: the sentences of the core, in at most 40 characters with the number that matters."""

from __future__ import annotations

import pytest

from carma.wire.short_reasons import MOST_LETTERS, short_reason

SHORT = {
    "held; `carma release 3` lets it start": "held",
    "its memory is being estimated; until then it can start only on an idle GPU": "its memory is being estimated",
    "back in the queue in 01:30: ran out of memory": "retried in 01:30",
    "back in the queue in 8 s: lost": "retried in 8 s",
    "waits for task 12": "after task 12",
    "begins in 01:00:00": "begins in 01:00:00",
    "1 task is before it in the queue; task 2 waits for a GPU first": "1 task before it",
    "2 of its array run; at most 2 may": "2 of its array run; at most 2 may",
    "user ada runs 2 of 2 tasks (quota.running; an administrator can raise it)": "quota: 2 of 2 tasks run",
    "user ada has 40.0 GiB of 60.0 GiB of GPU memory booked, and this asks for 30.0 GiB (quota.memory_share; an "
    "administrator can raise it)": "quota: 40.0 GiB of 60.0 GiB booked",
    "it asks for 8 GPUs; this server has 4": "wants 8 GPUs, the server has 4",
    "it asks for 90.0 GiB of GPU memory; the largest GPU here is GPU 0 with 40.0 GiB": "wants "
    "90.0 GiB, GPUs have 40.0 GiB",
    "needs 12.4 GiB; most free is 9.1 GiB on GPU 2; should start in about 59:51": "needs 12.4 GiB, GPU 2 has 9.1 GiB",
    "needs 2 GPUs; 1 of 3 can take it now; needs 12.4 GiB; most free is 9.1 GiB on GPU 2": "needs 2 GPUs, 1 of 3 can "
    "take it",
    "GPU 1: tasks 3, 4 are on it, and the policy does not share GPUs": "GPU 1 is in use",
    "GPU 0: has 4 tasks; the limit is 4; others: 1 drained": "GPU 0 has 4 tasks, the limit",
    "GPU 0: is too busy: sm_active 0.93 (cap 0.80), dram_active 0.51 (cap 0.40)": "GPU 0 is busy: SM 0.93 (cap 0.80)",
    "GPU 0: is too busy: dram_active 0.51 (cap 0.40)": "GPU 0 is busy: 0.51 (cap 0.40)",
    "GPU 0: beside task 3 it would take 1.72 times as long as alone, task 3 1.60 times (cap 1.5)": "GPU 0: slowdown "
    "1.72 (cap 1.5)",
    "GPU 0: task 1 is warming up: it first used the GPU 4 s ago; it must stay steady for 20 s, 16 s to go": "GPU 0: "
    "task 1 warms up for 16 s",
    "GPU 2: task 9 started 4 s ago and has not used the GPU yet; if it does not, it opens in 10 s": "GPU 2: task 9 is "
    "starting",
    "GPU 3: is reserved for task 7, which should start in 30 s": "GPU 3 is reserved for task 7",
    "the server is drained: maintenance until the evening": "the server is drained: maintenance unti…",
    "GPU 0: cannot be used: it fell off the bus": "GPU 0: it fell off the bus",
}


@pytest.mark.parametrize("sentence", SHORT)
def test_a_reason_keeps_its_cause_and_its_number(sentence: str) -> None:
    assert short_reason(sentence) == SHORT[sentence]
    assert len(short_reason(sentence)) <= MOST_LETTERS
