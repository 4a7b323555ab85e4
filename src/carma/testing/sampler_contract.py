"""What every sampler of GPU metrics must do, as tests: subclass `SamplerContract` and define the fixture `subject`.

    class TestMine(SamplerContract):
        @pytest.fixture
        def subject(self) -> Iterator[SamplerSubject]:
            sampler = MySampler()
            yield SamplerSubject(sampler)
            sampler.close()

pytest finds the inherited tests. This module does not import pytest.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import msgspec
from msgspec.structs import asdict

from carma.core.model.values import NO_ACTIVITY, Gpu, GpuId, GpuSample
from carma.core.ports import Sampler

AT_S = 1_700_000_000.0


class SamplerSubject(NamedTuple):
    """A sampler, and a function that breaks the GPU of an index (None: the GPUs cannot be broken)."""

    sampler: Sampler
    lose: Callable[[int], None] | None = None


def check_ranges(gpu: Gpu, sample: GpuSample) -> None:
    shares = asdict(sample.activity)
    for share in (*shares.values(), sample.gpu_util, sample.memory_util):
        assert share is None or 0.0 <= share <= 1.0
    assert sample.memory_used_mib is None or sample.memory_used_mib >= 0
    assert sample.power_w is None or 0.0 <= sample.power_w < 5000.0
    for process in sample.processes or ():
        assert process.pid > 0
        assert process.attempt is None  # who it belongs to is not the sampler's to say
        assert process.memory_mib is None or process.memory_mib >= 0
    given = gpu.capabilities
    assert all(metric in given.metrics for metric, share in shares.items() if share is not None)
    assert given.power or sample.power_w is None
    assert given.energy or sample.energy_j is None
    assert given.processes or sample.processes is None


class SamplerContract:
    def test_gpus_have_distinct_ids_and_stay_the_same(self, subject: SamplerSubject) -> None:
        gpus = subject.sampler.gpus()
        assert gpus
        assert len({gpu.id for gpu in gpus}) == len(gpus)
        assert len({gpu.index for gpu in gpus}) == len(gpus)
        assert all(gpu.memory_mib > 0 and gpu.name for gpu in gpus)
        assert subject.sampler.gpus() == gpus

    def test_each_gpu_has_one_sample_in_order_with_the_given_time(self, subject: SamplerSubject) -> None:
        samples = subject.sampler.sample(AT_S)
        assert [sample.gpu for sample in samples] == [gpu.id for gpu in subject.sampler.gpus()]
        assert {sample.at for sample in samples} == {AT_S}

    def test_every_figure_is_in_its_range_or_absent(self, subject: SamplerSubject) -> None:
        for at in (AT_S, AT_S + 1, AT_S + 2):
            for gpu, sample in zip(subject.sampler.gpus(), subject.sampler.sample(at), strict=True):
                check_ranges(gpu, sample)

    def test_every_gpu_names_the_source_of_its_activity(self, subject: SamplerSubject) -> None:
        for gpu in subject.sampler.gpus():
            can = gpu.capabilities
            assert can.source
            if can.source in ("inferred", "nvml"):  # coarse utilisation never stands for SM activity
                assert not can.metrics
            if can.source == "inferred":
                assert can.power
                assert gpu.power_limit_w
            if can.source == "processes":
                assert can.metrics == ("sm_active",)

    def test_a_memory_sample_shows_memory_and_processes_of_the_asked_gpus(self, subject: SamplerSubject) -> None:
        gpus = subject.sampler.gpus()
        wanted = [gpu.id for gpu in reversed(gpus)]
        observed = subject.sampler.sample_memory(wanted, AT_S)
        assert [sample.gpu for sample in observed] == wanted
        for gpu, sample in zip(reversed(gpus), observed, strict=True):
            check_ranges(gpu, sample)
            assert (sample.at, sample.fault) == (AT_S, None)
            assert sample.memory_used_mib is not None
            assert (sample.processes is not None) == gpu.capabilities.processes
            assert (sample.activity, sample.gpu_util, sample.memory_util) == (NO_ACTIVITY, None, None)
            assert (sample.power_w, sample.energy_j) == (None, None)
        assert subject.sampler.sample_memory([], AT_S) == ()

    def test_a_memory_sample_sees_the_same_processes_as_a_sample(self, subject: SamplerSubject) -> None:
        sampled = subject.sampler.sample(AT_S)
        observed = subject.sampler.sample_memory([sample.gpu for sample in sampled], AT_S)
        for sample, memory in zip(sampled, observed, strict=True):
            assert {process.pid for process in sample.processes or ()} == {
                process.pid for process in memory.processes or ()
            }

    def test_a_memory_sample_of_an_unknown_gpu_is_a_fault(self, subject: SamplerSubject) -> None:
        (unknown,) = subject.sampler.sample_memory([GpuId("GPU-of-another-machine")], AT_S)
        assert unknown.fault
        assert (unknown.gpu, unknown.memory_used_mib) == ("GPU-of-another-machine", None)

    def test_energy_is_a_counter_that_never_falls(self, subject: SamplerSubject) -> None:
        seen = [subject.sampler.sample(AT_S + step) for step in range(4)]
        for earlier, later in pairwise(seen):
            for before, after in zip(earlier, later, strict=True):
                if before.energy_j is not None and after.energy_j is not None:
                    assert after.energy_j >= before.energy_j

    def test_samples_can_be_written_and_read_again(self, subject: SamplerSubject) -> None:
        samples = subject.sampler.sample(AT_S)
        assert msgspec.json.decode(msgspec.json.encode(samples), type=tuple[GpuSample, ...]) == samples

    def test_a_lost_gpu_is_a_fault_without_figures_and_the_others_are_sampled(self, subject: SamplerSubject) -> None:
        if subject.lose is None:
            raise unittest.SkipTest("this sampler's GPUs cannot be broken on purpose")
        gpus = subject.sampler.gpus()
        subject.sampler.sample(AT_S)
        subject.lose(gpus[-1].index)
        *others, lost = subject.sampler.sample(AT_S + 1)
        assert lost.gpu == gpus[-1].id
        assert lost.fault
        assert (lost.activity, lost.memory_used_mib, lost.processes) == (NO_ACTIVITY, None, None)
        assert all(other.fault is None and other.memory_used_mib is not None for other in others)
        assert subject.sampler.gpus() == gpus
        (observed,) = subject.sampler.sample_memory([lost.gpu], AT_S + 1)
        assert observed.fault
        assert (observed.memory_used_mib, observed.processes) == (None, None)

    def test_closing_is_idempotent(self, subject: SamplerSubject) -> None:
        subject.sampler.close()
        subject.sampler.close()
