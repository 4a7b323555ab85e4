"""Reasons in at most 40 characters, for a column: what keeps a task waiting, with the number that matters.

The whole sentence stands in `explain`. A sentence without a row here is cut after its first clause.
"""

from __future__ import annotations

import re

MOST_LETTERS = 40
_GPU = r"^(?:needs \d+ GPUs; \d+ of \d+ can take it now; )?GPU (\d+): "
_FORMS = tuple(
    (re.compile(pattern), short)
    for pattern, short in (
        (r"^held; ", "held"),
        (r"^its memory is being estimated", "its memory is being estimated"),
        (r"^its attempt has just ended", "its retry is being decided"),
        (r"^back in the queue in (\d+(?:[:.]\d+)*(?: s)?)", r"retried in \1"),
        (r"^waits for task (\d+)", r"after task \1"),
        (r"^(\d+ tasks?) (?:is|are) before it", r"\1 before it"),
        (r"^task (\d+) of user .* is before it, and at a quota", r"task \1 before it is at a quota"),
        (r"^user (?:.*) runs (\d+) of (\d+) tasks?", r"quota: \1 of \2 tasks run"),
        (r"^user (?:.*) holds (\d+) of (\d+) GPUs?", r"quota: \1 of \2 GPUs held"),
        (r"^asks for (\d+) GPUs?, and user (?:.*) may hold (\d+)", r"quota: wants \1 GPUs, may hold \2"),
        (r"^user (?:.*) has (.+?) of (.+?) of GPU memory booked", r"quota: \1 of \2 booked"),
        (r"^it asks for (\d+) GPUs?; this server has (\d+)", r"wants \1 GPUs, the server has \2"),
        (
            r"^it asks for (.+?) of GPU memory; the largest GPU here is GPU \d+ with (.+?)(?:,|$)",
            r"wants \1, GPUs have \2",
        ),
        (r"^placed on GPU ([\d, ]+)", r"starts on GPU \1"),
        (r"^needs (\d+) GPUs; this server has (\d+)", r"needs \1 GPUs, the server has \2"),
        (r"^needs (\d+) GPUs; (\d+ of \d+) can take it now; ", r"needs \1 GPUs, \2 can take it"),
        (r"^needs (.+?); most free is (.+?) on GPU (\d+)", r"needs \1, GPU \3 has \2"),
        (_GPU + r".* is on it, and the policy does not share", r"GPU \1 is in use"),
        (_GPU + r".* are on it, and the policy does not share", r"GPU \1 is in use"),
        (_GPU + r"task (\d+) has it alone", r"GPU \1: task \2 has it alone"),
        (_GPU + r"the task wants a GPU alone", r"wants a GPU alone; GPU \1 is in use"),
        (_GPU + r"the memory of the task is being estimated", r"its memory is being estimated"),
        (_GPU + r"has (\d+ tasks?); ", r"GPU \1 has \2, the limit"),
        (_GPU + r"is too busy: sm_active ([\d.]+) \(cap ([\d.]+)\)", r"GPU \1 is busy: SM \2 (cap \3)"),
        (_GPU + r"is too busy: \w+?_(?:active|occupancy) ([\d.]+) \(cap ([\d.]+)\)", r"GPU \1 is busy: \2 (cap \3)"),
        (_GPU + r".*?([\d.]+) times.*\((cap|limit) ([\d.]+)\)", r"GPU \1: slowdown \2 (\3 \4)"),
        (_GPU + r"task (\d+) is warming up.* (\d[\d:]*(?: s)?) to go", r"GPU \1: task \2 warms up for \3"),
        (_GPU + r"task (\d+) is warming up", r"GPU \1: task \2 warms up"),
        (_GPU + r"task (\d+) (?:started|was sent)", r"GPU \1: task \2 is starting"),
        (_GPU + r"is reserved for task (\d+)", r"GPU \1 is reserved for task \2"),
        (_GPU + r"its (?:memory|activity) is not known", r"GPU \1: no samples yet"),
        (_GPU + r"(?:is |cannot be used: )?(.*)", r"GPU \1: \2"),
    )
)


def short_reason(sentence: str) -> str:
    """`3 tasks before it`, `needs 12.4 GiB, GPU 2 has 9.1 GiB`."""
    for pattern, short in _FORMS:
        found = pattern.match(sentence)
        if found is not None:
            return _cut(found.expand(short))
    return _cut(sentence)


def _cut(text: str) -> str:
    clause = text.partition("; ")[0] if len(text) > MOST_LETTERS else text
    return clause if len(clause) <= MOST_LETTERS else clause[: MOST_LETTERS - 1].rstrip(" ,:") + "…"
