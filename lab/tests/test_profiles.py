"""The program that measures tasks alone, on a processor with small shapes; its meter; and the tables made of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from carma.traces.table import SHIPPED, find, read_table, shipped_table
from carma_lab.bench.gpu import profiles
from carma_lab.bench.gpu.profile_tasks import TASKS
from carma_lab.traces.writer import write_table
from lab.tools import profile_tables
from lab.tools import published as publishing

FIGURES: dict[str, Any] = {
    "step_ms": 20.0,
    "sm_active": 0.6,
    "sm_occupancy": 0.3,
    "dram_active": 0.2,
    "gr_active": 0.8,
    "power_w": 400.0,
    "tensor_active": 0.1,
    "fp32_active": None,
    "used_mib": 4000,
}


def test_every_task_of_the_traces_is_measured_once() -> None:
    names = [name for task in TASKS for name in task.trace_names]
    assert len(set(names)) == len(names)
    assert {task.name for trace in SHIPPED for task in find(trace).tasks} <= set(names)
    assert len({task.name for task in TASKS}) == len(TASKS)


def test_the_tasks_agree_with_the_table_of_the_traces() -> None:
    """Batch (each GPU's part of it) and GPUs; and a loop is no longer than the whole run, start-up and all."""
    table = shipped_table().tasks
    for task in TASKS:
        for name in task.trace_names:
            assert table[name].batch in (task.batch, task.batch * task.busy_gpus)
            assert table[name].gpus == task.gpus
    whole = {name: table[name].seconds for task in TASKS for name in task.trace_names if "_20e_" not in name}
    for task in TASKS:
        if task.model.endswith("-cifar") or task.model == "mnist":  # measured over other epochs than the traces run
            continue
        assert task.loop_s == pytest.approx(whole[task.trace_names[-1]], rel=0.14)


@pytest.fixture
def one_thread() -> Iterator[Any]:
    """torch, which must not fight for the few cores that all tests share."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch
    torch.set_num_threads(before)


def run(tmp_path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "profiles.json"
    code = profiles.main(
        ["--device", "cpu", "--tiny", "--seconds", "0.01", "--limit", "1e6", "--out", str(out), *flags]
    )
    return code, json.loads(out.read_text())


@pytest.mark.usefixtures("one_thread")
def test_it_measures_what_it_can_and_says_why_not_of_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from carma_lab.bench.gpu import profile_steps

    def broken(*_: object) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setitem(profile_steps._SPECIAL, "unet", broken)
    flags = [word for name in ("mnist-b64", "unet-b8", "dlrm-b32768") for word in ("--only", name)]
    code, written = run(tmp_path, *flags)
    assert code == 0
    rows = {row["name"]: row for row in written["rows"]}
    assert set(rows) == {"mnist-b64", "unet-b8", "dlrm-b32768"}
    assert "CUDA out of memory" in rows["unet-b8"]["error"]
    for name in ("mnist-b64", "dlrm-b32768"):
        assert rows[name]["steps"] >= 1
        assert rows[name]["step_ms"] == pytest.approx(1000 * rows[name]["seconds"] / rows[name]["steps"], rel=0.01)
        assert 0 < rows[name]["host_ms"] <= rows[name]["step_ms"]
    assert written["about"]["torch"]
    assert written["about"]["command"].startswith("python -m carma_lab.bench.gpu.profiles --device cpu")


@pytest.mark.usefixtures("one_thread")
def test_it_leaves_out_what_there_is_no_time_for(tmp_path: Path) -> None:
    code, written = run(tmp_path, "--only", "mnist-b64", "--limit", "0")
    assert code == 1  # nothing was measured
    assert written["rows"][0]["error"] == "no time was left"


def test_a_step_trains(one_thread: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All weights of the models that are written here get a gradient, and a step changes them."""
    torch = one_thread
    from carma_lab.bench.gpu import profile_steps

    made: list[Any] = []
    trained = profile_steps._trained

    def kept(model: Any, *rest: Any, **more: Any) -> Any:
        made.append(model)
        return trained(model, *rest, **more)

    monkeypatch.setattr(profile_steps, "_trained", kept)
    monkeypatch.setattr(profile_steps, "RATE", 0.1)
    tasks = {task.model: task for task in TASKS}
    for name in ("mnist", "dlrm"):
        launch = profile_steps.build(tasks[name], profile_steps.Place("cpu", tiny=True)).usual
        before = [weight.detach().clone() for weight in made[-1].parameters()]
        assert torch.isfinite(launch())
        assert all(weight.grad is not None for weight in made[-1].parameters())
        after = list(made[-1].parameters())
        assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_an_unknown_task_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert profiles.main(["--only", "resnet1000"]) == 2
    assert "resnet1000" in capsys.readouterr().err


class FakeNvml:
    """A card that is 40 % busy by each figure and draws 250 W."""

    NVML_GPM_METRICS_GET_VERSION = 1
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2

    def __init__(self, offers: bool = True) -> None:
        self.offers = offers
        self.now = 0.0
        for place, name in enumerate(profiles.METRICS.values()):
            setattr(self, name, place)

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"card {index}"

    def nvmlGpmQueryDeviceSupport(self, _: str) -> SimpleNamespace:
        return SimpleNamespace(isSupportedDevice=self.offers)

    def nvmlGpmSampleAlloc(self) -> dict[str, float]:
        return {}

    def nvmlGpmSampleGet(self, _: str, snapshot: dict[str, float]) -> dict[str, float]:
        snapshot["at"] = self.now
        return snapshot

    def c_nvmlGpmMetricsGet_t(self) -> SimpleNamespace:
        metrics = [SimpleNamespace(metricId=None, value=0.0, nvmlReturn=0) for _ in range(16)]
        return SimpleNamespace(metrics=metrics)

    def nvmlGpmMetricsGet(self, question: SimpleNamespace) -> SimpleNamespace:
        assert question.sample1["at"] < question.sample2["at"]
        for metric in question.metrics[: question.numMetrics]:
            metric.value = 40.0
        question.metrics[5].nvmlReturn = 3  # not supported: its value means nothing
        return question

    def nvmlDeviceGetTotalEnergyConsumption(self, _: str) -> int:
        return int(250_000 * self.now)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def meter_of(nvml: FakeNvml) -> profiles.Meter:
    return profiles.Meter(lambda: nvml.now)


def test_the_meter_reads_a_span(nvml: FakeNvml) -> None:
    meter = meter_of(nvml)
    first = meter.mark()
    nvml.now = 2.0
    shown = meter.between(first, meter.mark(end=True))
    assert shown["sm_active"] == pytest.approx(0.4)
    assert shown["fp32_active"] is None
    assert shown["power_w"] == pytest.approx(250.0)
    assert meter.used_mib() is None  # this one does not tell


def test_a_span_that_is_too_short_says_nothing(nvml: FakeNvml) -> None:
    meter = meter_of(nvml)
    first = meter.mark()
    nvml.now = 0.05
    assert set(meter.between(first, meter.mark(end=True)).values()) == {None}


def test_a_card_without_gpm_still_tells_its_power(nvml: FakeNvml) -> None:
    nvml.offers = False
    meter = meter_of(nvml)
    first = meter.mark()
    nvml.now = 1.0
    shown = meter.between(first, meter.mark(end=True))
    assert shown["sm_active"] is None
    assert shown["power_w"] == pytest.approx(250.0)
    assert "no GPM" in meter.why


def test_without_a_driver_the_figures_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    meter = profiles.Meter()
    assert set(meter.between(meter.mark(), meter.mark(end=True)).values()) == {None}
    assert meter.about()["gpu"] is None
    assert meter.clocks_mhz() == {"sm_mhz": None, "memory_mhz": None}
    assert "no NVML" in meter.why


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    rows = [{"name": task.name, **FIGURES, "step_ms": task.step_ms / 4} for task in TASKS]
    rows[0] = {"name": TASKS[0].name, "error": "no time was left"}
    del rows[1]["gr_active"]
    path = tmp_path / "measured.json"
    path.write_text(json.dumps({"about": {"idle_w": 80.0, "power_limit_w": 700.0}, "rows": rows[:-1]}))
    return path


def test_what_was_not_measured_is_said(measured: Path) -> None:
    pairs, missing = profile_tables.load(measured)
    assert len(pairs) == len(TASKS) - 3
    assert missing == [
        f"{TASKS[0].name}: no time was left",
        f"{TASKS[1].name}: without gr_active",
        f"{TASKS[-1].name}: it is not in the file",
    ]


def test_a_task_takes_its_known_time_on_the_a100(measured: Path) -> None:
    pairs, _ = profile_tables.load(measured)
    assert all(pair.scaled.step_ms == pair.task.step_ms for pair in pairs)


def test_averages_are_weighted_by_the_time_of_busy_gpus(measured: Path) -> None:
    pairs, _ = profile_tables.load(measured)
    trace = find("t1")
    kept = [pair for pair in pairs if pair.task.name in ("xlnet-base-b8", "bert-base-b32")]
    values, without = profile_tables.averages(trace, kept)
    known = {name: pair for pair in kept for name in pair.task.trace_names}
    there = [task for task in trace.tasks if task.name in known]
    assert len(there) == 2  # two of t1's sixty
    weights = [task.seconds for task in there]  # XLNet asks for two GPUs and uses one
    expected = sum(weight * known[task.name].scaled.power_w for task, weight in zip(there, weights, strict=True)) / sum(
        weights
    )
    assert values["power_w"] == pytest.approx(expected)
    others = sum(task.gpus * task.seconds for task in trace.tasks if task.name not in known)
    assert without == pytest.approx(others / (others + sum(weights)))


def test_errors_are_against_what_was_published(measured: Path, tmp_path: Path) -> None:
    published = tmp_path / "published.csv"
    published.write_text(
        "# where it is from\nname,sm_active,sm_occupancy,dram_active,gr_active,power_w\n"
        "BERT_base,0.5,0.2,0.1,,\nresnet34_cifar100_20e_1,0.1,0.1,0.1,,\nresnet34_cifar100_50e_1,0.3,0.1,0.1,,\n"
    )
    pairs, _ = profile_tables.load(measured)
    by_name = {pair.task.name: pair.scaled.demand for pair in pairs}
    found = profile_tables.errors(pairs, publishing.read(published))
    expected = [by_name["bert-base-b32"].sm_active - 0.5, by_name["resnet34-cifar-b32"].sm_active - 0.2]
    assert found["sm_active"] == pytest.approx(expected)
    assert found["power_w"] == []


def test_demands_are_written_into_a_table_and_nothing_else_is(measured: Path, tmp_path: Path) -> None:
    table = tmp_path / "tasks.csv"
    write_table(shipped_table(), table)
    before = read_table(table).tasks
    pairs, _ = profile_tables.load(measured)
    solo = publishing.read()
    published = {name: solo[name] for name in ("xlnet_base_cased_2", "gpt2_large_2", "gpt2_xl")}
    measured_names = {name for pair in pairs for name in pair.task.trace_names}
    assert profile_tables.write_demands(pairs, published, table) == (2, len(measured_names - published.keys()))
    after = read_table(table).tasks
    scaled = next(pair.scaled.demand for pair in pairs if pair.task.name == "bert-base-b32")
    assert after["BERT_base"].sm_active == pytest.approx(scaled.sm_active, abs=0.0006)
    assert after["BERT_base"].power == pytest.approx(scaled.power, abs=0.0006)
    assert after["mnist_train"] == before["mnist_train"]  # it was not measured
    xlnet = after["xlnet_base_cased_2"]
    assert (xlnet.sm_active, xlnet.start_s, xlnet.busy_gpus) == (0.822, 18.5, 1)  # of the GPU that it uses
    assert after["gpt2_large_2"].sm_active == pytest.approx((0.8418 + 0.7969) / 2, abs=0.0006)  # of both
    assert after["gpt2_large_2"].busy_gpus == 0
    for name, task in after.items():
        for figure in ("gpus", "memory_mib", "seconds", "horus_mib", "model", "batch"):
            assert getattr(task, figure) == getattr(before[name], figure)


def test_the_tables_are_printed(measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    published = tmp_path / "published.csv"
    published.write_text("name,sm_active,sm_occupancy,dram_active\nBERT_base,0.5,0.2,0.1\n")
    assert profile_tables.main(["--profiles", str(measured), "--published", str(published)]) == 0
    told = capsys.readouterr().out
    assert "| bert-base-b32 |" in told
    assert all(f"| {name} |" in told for name in SHIPPED)
    assert f"Not measured: {TASKS[0].name}: no time was left" in told
    assert "mean absolute error" in told
