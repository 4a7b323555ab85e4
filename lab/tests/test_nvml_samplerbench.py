"""The sampler's benchmark on a scripted NVML: it measures what it says. Real figures come from a real card."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pynvml
import pytest

from carma.errors import NoGpus, Usage
from carma_lab.bench import sampler as samplerbench
from carma_lab.bench.sampler import Meter, Options, Report, SamplerGroup
from tests.scripted_nvml import MIB, Card, ScriptedNvml

QUICK = Options(seconds=1.0, gpus=8)


def test_one_card_is_read_as_often_as_eight_would_be_and_the_report_says_what_each_call_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nvml = ScriptedNvml(Card("GPU-a", compute=[(5, MIB)]))
    file = tmp_path / "sampler.json"
    assert samplerbench.run(msgspec.structs.replace(QUICK, json=str(file)), nvml) == 0
    report = msgspec.json.decode(file.read_bytes(), type=Report)
    assert (report.gpus, report.cards, report.sources, report.driver) == (8, ("NVIDIA H200",), ("gpm",), "580.159.04")
    assert report.processes == 1
    assert [(cost.kind, cost.hz) for cost in report.costs] == [("sample", 1.0), ("memory", 5.0)]
    for cost in report.costs:
        assert cost.core_percent == pytest.approx(
            100 * cost.hz * cost.mean_ms / 1000, abs=1e-5 * (1 + cost.hz)
        )  # the file has five digits
        assert cost.mean_ms > 0.0
    asked = {(call.kind, call.function) for call in report.calls}
    assert ("sample", "nvmlGpmSampleGet") in asked
    assert ("memory", "nvmlGpmSampleGet") not in asked
    assert ("memory", "nvmlDeviceGetComputeRunningProcesses_v3") in asked
    assert nvml.snapshots == 0  # everything was closed
    assert "% of a core" in capsys.readouterr().out


def test_json_to_standard_output_is_json_alone(capsys: pytest.CaptureFixture[str]) -> None:
    samplerbench.run(Options(seconds=0.3, gpus=1, json="-"), ScriptedNvml(Card("GPU-a")))
    assert msgspec.json.decode(capsys.readouterr().out, type=Report).gpus == 1


@pytest.mark.parametrize(("cards", "samplers"), [(1, 8), (3, 3), (8, 1), (10, 1)])
def test_there_are_as_many_samplers_as_it_takes(cards: int, samplers: int) -> None:
    group = SamplerGroup(ScriptedNvml(*(Card(f"GPU-{number}") for number in range(cards))), 8)
    assert len(group.samplers) == samplers
    group.close()


def test_the_meter_counts_calls_that_fail_as_well_and_leaves_the_rest_alone() -> None:
    nvml = ScriptedNvml(Card("GPU-a"))
    nvml.init_error = pynvml.NVML_ERROR_UNKNOWN
    meter = Meter(nvml)
    with pytest.raises(pynvml.NVMLError):
        meter.nvmlInit()
    assert dict(meter.calls) == {"nvmlInit": 1}
    assert meter.NVML_GPM_METRIC_SM_UTIL == pynvml.NVML_GPM_METRIC_SM_UTIL


def test_without_a_gpu_it_says_so() -> None:
    nvml = ScriptedNvml()
    nvml.init_error = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    with pytest.raises(NoGpus):
        samplerbench.run(QUICK, nvml)


@pytest.mark.parametrize("options", [Options(gpus=0), Options(seconds=0.0), Options(json="/no/such/place/x.json")])
def test_what_cannot_be_measured_is_refused_before_anything_runs(options: Options) -> None:
    nvml = ScriptedNvml(Card("GPU-a"))
    with pytest.raises(Usage):
        samplerbench.run(options, nvml)
    assert nvml.inits == 0
