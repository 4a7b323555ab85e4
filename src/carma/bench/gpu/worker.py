"""One workload, held ready on the GPU: `python -m carma.bench.gpu.worker NAME`. Runs when it is told to, and counts.

Orders come as JSON lines on standard input, `{"start": T, "warm_s": W, "measure_s": M}` with T on the machine's
monotonic clock, which all processes share; answers go out as JSON lines. At most two steps are in flight, as in a
training loop that looks at its loss, so what is counted has really been done.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from typing import Any

TAIL_S = 0.25  # goes on for so long after its own count, so that the others are not measured in a quieter moment


def main() -> int:
    import torch

    from carma.bench.gpu.workloads import BY_NAME

    torch.set_num_threads(1)
    step = BY_NAME[sys.argv[1]].build()
    for _ in range(8):
        step()
    torch.cuda.synchronize()
    _say({"reserved_mib": torch.cuda.max_memory_reserved() >> 20, "torch": torch.__version__})
    for line in sys.stdin:
        order = json.loads(line)
        _say(_run(step, order["start"], order["warm_s"], order["measure_s"], torch))
    return 0


def _run(step: Any, start: float, warm_s: float, measure_s: float, torch: Any) -> dict[str, float]:
    """Steps per second between the first and the last step that ended within the span."""
    while time.monotonic() < start:
        time.sleep(0.0005)
    begin, end = start + warm_s, start + warm_s + measure_s
    flying: deque[Any] = deque()
    first = last = 0.0
    ended = 0
    while True:
        step()
        mark = torch.cuda.Event(blocking=False)
        mark.record()
        flying.append(mark)
        if len(flying) > 2:
            flying.popleft().synchronize()
            now = time.monotonic()
            if begin <= now <= end:
                ended += 1
                first, last = first or now, now
            if now > end + TAIL_S:
                break
    torch.cuda.synchronize()
    rate = (ended - 1) / (last - first) if ended > 2 else ended / measure_s
    return {"rate": rate, "steps": ended}


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    sys.exit(main())
