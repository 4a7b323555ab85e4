"""A dry run, and a submission that must start now, ask the same estimators as any other submission."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from carma.errors import NoCapacity
from tests.harness import request, serving, until, virtual


def test_what_a_command_took_before_counts_before_it_is_submitted() -> None:
    with serving(gpus=1, memory_mib=8192, virtual__speed=20) as daemon:
        command = virtual(6_000, 30)
        assert daemon.wait(daemon.submit(*command)).exit_code == 0
        asked = request(*command, directory=str(daemon.home))
        dry = replace(asked, dry_run=True)
        known = "would start on GPU 0 now, 6.2 GiB booked (history)"
        until(lambda: daemon.client.submit(dry).note == known, "the run is remembered")
        other = daemon.submit(*virtual(3_000, 36_000), gpu_memory_mib=3_072)
        daemon.until_state(other, "running")
        told = daemon.client.submit(dry)
        assert told.note.startswith("would wait: needs 6.2 GiB; most free is 4.5 GiB on GPU 0")
        assert [(entry.accepted, entry.code) for entry in told.explain] == [(False, "Memory")]
        with pytest.raises(NoCapacity, match=r"needs 6\.2 GiB"):
            daemon.client.submit(replace(asked, nonblock=True))
        assert [task.id for task in daemon.client.tasks()] == [other]
