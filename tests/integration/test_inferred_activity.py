"""A daemon on virtual GPUs that show power and utilisation only (monitor.sm_activity): tasks share them."""

from __future__ import annotations

from tests.harness import serving, until, virtual

FAST = {"virtual__speed": 20, "monitor__period_s": 0.05, "monitor__sm_activity": "inferred"}
UNLIMITED = {"sharing__caps": False}  # so that the GPU is closed until the task has settled and its window counts


def test_two_tasks_share_a_gpu_whose_activity_is_inferred() -> None:
    with serving(gpus=1, **FAST, **UNLIMITED) as daemon:
        light = virtual(1000, 100_000, sm=0.3)
        first = daemon.submit(*light, gpu_memory_mib=1500)
        until(lambda: daemon.client.gpus()[0].tasks == (first,), "the first task is on it")
        until(lambda: daemon.client.gpus()[0].state == "open", "it has settled and the gate is open")
        (gpu,) = daemon.client.gpus()
        assert (gpu.activity_source, gpu.metrics) == ("inferred", "inferred")
        assert gpu.sm_active is not None
        assert 0.0 < gpu.sm_active < gpu.risk["sm_active"]
        second = daemon.submit(*light, gpu_memory_mib=1500)
        until(lambda: daemon.client.gpus()[0].tasks == (first, second), "both run on it")
        assert [entry.activity_source for entry in daemon.client.explain(second).entries] == ["inferred"]
        assert daemon.client.task(first).attempts[-1].activity_inferred
        daemon.client.cancel(first)
        assert not daemon.wait(first).attempts[-1].activity_inferred


def test_a_busy_gpu_is_refused_by_what_is_inferred() -> None:
    with serving(gpus=1, placement__policy="magm", **FAST) as daemon:
        daemon.submit(*virtual(1000, 100_000, "--dram", "0.6", sm=0.95), gpu_memory_mib=1500)
        until(lambda: daemon.client.gpus()[0].state == "closed", "the gate is closed")
        assert "inferred" in daemon.client.gpus()[0].reason
