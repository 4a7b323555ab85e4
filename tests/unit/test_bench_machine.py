"""What the benches say of the machine and of processes."""

from __future__ import annotations

import os
import subprocess
import sys

from carma.bench.machine import cpu_s

BUSY = "import time\nuntil = time.process_time() + 0.3\nwhile time.process_time() < until: pass"


def test_a_childs_processor_time_is_not_its_parents() -> None:
    """A daemon waits for its runners, and a runner for its task: four tasks would look like 400 % of a core."""
    before_s = cpu_s(os.getpid())
    subprocess.run([sys.executable, "-S", "-c", BUSY], check=True)
    assert cpu_s(os.getpid()) - before_s < 0.25
    until_s = cpu_s(os.getpid()) + 0.1
    while cpu_s(os.getpid()) < until_s:  # ends only if its own time is counted
        pass
