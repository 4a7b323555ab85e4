"""The stand-in for a training script on virtual GPUs: memory, activity, and a step for each 10 ms of work alone.

It prints what the scripts print.
"""

from __future__ import annotations

import argparse
import time
from contextlib import closing

from carma_lab.bench.gpu.trial_task import VirtualCard


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--memory-mib", type=int, required=True)
    parser.add_argument("--sm", type=float, required=True)
    parser.add_argument("--dram", type=float, required=True)
    asked = parser.parse_args()
    with closing(VirtualCard(asked.sm, asked.dram)) as card:
        card.take(asked.memory_mib)
        start, steps, every = time.monotonic(), 0, max(1, asked.steps // 20)
        printed = 0
        while steps < asked.steps:
            steps += card.step()
            if steps - printed >= every or steps >= asked.steps:
                printed = steps
                print(f"step {steps}  loss 0.0  {time.monotonic() - start:.2f} s", flush=True)


if __name__ == "__main__":
    main()
