"""One workload, ready on the GPU: `python -m carma_lab.bench.gpu.worker NAME`. It runs on order and counts its steps.

Orders come as JSON lines on standard input, `{"start": T, "warm_s": W, "measure_s": M}` with T on the machine's
monotonic clock, which all processes share; answers go out as JSON lines. At most two steps are in flight, as in a
training loop that reads its loss, so that counted steps are done. Waiting for a step takes no processor time, so that
the CPU use in the answer is the task's own work. It ends when its input ends.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TextIO

TAIL_S = 0.25  # of steps after its own measurement, so that the others are measured under the same load


def main() -> int:
    answers = _answers()
    import torch

    from carma_lab.bench.gpu.collocated import find

    def event() -> Any:
        return torch.cuda.Event(blocking=True)

    torch.set_num_threads(1)
    step = find(sys.argv[1]).build()
    for _ in range(8):
        step()
    torch.cuda.synchronize()
    _say(answers, {"reserved_mib": torch.cuda.max_memory_reserved() >> 20, "torch": torch.__version__})
    for line in sys.stdin:
        order = json.loads(line)
        answer = measure(step, order["start"], order["warm_s"], order["measure_s"], event)
        torch.cuda.synchronize()
        _say(answers, answer)
    return 0


def measure(step: Any, start: float, warm_s: float, measure_s: float, event: Callable[[], Any]) -> dict[str, Any]:
    """Steps per second between the first and the last step that ended within the span, and the CPU time they took."""
    while time.monotonic() < start:
        time.sleep(0.0005)
    begin, end = start + warm_s, start + warm_s + measure_s
    flying: deque[Any] = deque()
    first = last = first_cpu_s = last_cpu_s = 0.0
    ended = 0
    while True:
        step()
        mark = event()
        mark.record()
        flying.append(mark)
        if len(flying) > 2:
            flying.popleft().synchronize()
            now = time.monotonic()
            if begin <= now <= end:
                ended += 1
                last, last_cpu_s = now, time.process_time()
                if ended == 1:
                    first, first_cpu_s = last, last_cpu_s
            if now > end + TAIL_S:
                break
    if ended <= 2:  # too few for a span of their own
        return {"rate": ended / measure_s, "steps": ended, "cpu": None}
    return {
        "rate": (ended - 1) / (last - first),
        "steps": ended,
        "cpu": (last_cpu_s - first_cpu_s) / (last - first),
    }


def _answers() -> TextIO:
    """Standard output for answers alone: what a library prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _say(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main())
