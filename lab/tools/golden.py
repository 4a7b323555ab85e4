"""Golden decision logs: every decision of every policy on two small traces, as text, in lab/tests/golden.

`python -m lab.tools.golden` compares them with what the program decides now and prints the differences; `--write`
writes them again, which belongs to every change that is meant to change decisions. A line is one decision of the core:

    5.0 3.1 GPU 2: idle, room 40.0 GiB [40960] not 0 Memory, 1 WarmUp; before 2

At that time, attempt 3.1 goes to GPU 2, with the policy's sentence and the parts of its score (of each of its GPUs);
why not to the others; and whom it went before. What recovery decides has lines of its own.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from carma.core.model import events as e
from carma.core.model.decision import Verdict
from carma.core.model.outcome import Succeeded
from carma.core.model.values import GpuId
from carma.plugins import POLICIES, names
from carma.traces import Trace, find
from carma.traces.table import shipped_table
from carma_lab.simulator.request import Request, simulation
from carma_lab.traces.generate import Recipe, generate

GOLDEN = Path(__file__).parents[2] / "lab" / "tests" / "golden"
WRITE = "python -m lab.tools.golden --write"
GENERATED = Recipe(tasks=30, rate_per_hour=90, seed=5, burst=True, users=3)
SHOWN_LINES = 40  # of each file's difference


def cases(policy: str) -> Iterator[tuple[str, Trace, Request]]:
    """Memory that is known and the model that is the truth; memory by a trial run, and a truth that is off."""
    first = Trace(name="t1", tasks=find("t1").tasks[:20])
    yield "the first 20 tasks of t1, 4 GPUs", first, Request(policy=policy)
    request = Request(policy=policy, gpus=3, memory="trace", demand="history", noise=1.0, seed=5)
    yield f"{GENERATED.spelled()}, 3 GPUs, demands by history, noise", generate(GENERATED, shipped_table()), request


def log_of(policy: str) -> str:
    lines: list[str] = []
    for title, trace, request in cases(policy):
        lines.append(f"# {policy}: {title}")
        made = simulation(request, trace)
        index = {GpuId(gpu.gpu): gpu.index for gpu in made.server.gpus}
        lines.extend(line for event in made.events() if (line := _line(event, index)) is not None)
    return "\n".join(lines) + "\n"


def _line(event: e.AnyEvent, index: dict[GpuId, int]) -> str | None:
    match event:
        case e.TaskPlaced(at=at, key=key, why=why, overtook=overtook, verdicts=verdicts):
            said = f"{at:.1f} {key} {why.removeprefix('placed on ')}"
            said += _scores(verdicts, event.placement.gpus, why) + _refusals(verdicts, index)
            return said + ("" if overtook is None else f"; before {overtook}")
        case e.RecoveryPlanned(at=at, task=task, plan=plan, until=until):
            booked = "" if plan.memory_mib is None else f", {plan.memory_mib} MiB"
            return f"{at:.1f} {task} comes back at {until:.1f}: {plan.rung}{booked}"
        case e.TaskFinished(at=at, task=task, outcome=outcome) if not isinstance(outcome, Succeeded):
            return f"{at:.1f} {task} ends: {type(outcome).__name__}"
        case _:
            return None


def _scores(verdicts: Sequence[Verdict], gpus: Sequence[GpuId], why: str) -> str:
    """Scores, if the sentence does not contain them all."""
    parts = {verdict.gpu: verdict.parts for verdict in verdicts}
    if all(f"{part.name.replace('_', ' ')} {part.value:g}" in why for gpu in gpus for part in parts[gpu]):
        return ""
    return " " + "".join(f"[{', '.join(f'{part.value:g}' for part in parts[gpu])}]" for gpu in gpus)


def _refusals(verdicts: Sequence[Verdict], index: dict[GpuId, int]) -> str:
    said = [
        f"{index[verdict.gpu]} {verdict.refusal.code}"
        for verdict in sorted(verdicts, key=lambda verdict: index[verdict.gpu])
        if verdict.refusal is not None
    ]
    return f" not {', '.join(said)}" if said else ""


def difference(policy: str, folder: Path = GOLDEN) -> list[str]:
    """Empty where the kept log is, byte by byte, what the policy decides now."""
    file = folder / f"{policy}.txt"
    new = log_of(policy)
    if not file.exists():
        return [f"{file.name} is not there"]
    if file.read_bytes() == new.encode():
        return []
    old = file.read_text(encoding="utf-8").splitlines()
    lines = list(
        difflib.unified_diff(old, new.splitlines(), f"{file.name} as kept", "as decided now", n=1, lineterm="")
    )
    more = [f"... and {len(lines) - SHOWN_LINES} lines more"] if len(lines) > SHOWN_LINES else []
    return [*(lines[:SHOWN_LINES] or [f"{file.name} differs in its line ends"]), *more]


def strangers(folder: Path = GOLDEN) -> list[str]:
    """Files that no policy has written."""
    return sorted({file.name for file in folder.glob("*")} - {f"{policy}.txt" for policy in names(POLICIES)})


def write(folder: Path = GOLDEN) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for policy in names(POLICIES):
        (folder / f"{policy}.txt").write_bytes(log_of(policy).encode())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.tools.golden", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the logs again, as decided now")
    if parser.parse_args(arguments).write:
        write()
        return 0
    problems = [line for policy in names(POLICIES) for line in difference(policy)]
    problems.extend(f"{name} is no policy's" for name in strangers())
    if problems:
        print("\n".join(problems), file=sys.stderr)
        print(f"if these decisions are meant, keep them: {WRITE}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
