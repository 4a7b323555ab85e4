"""The collocation study without a GPU: whole runs with made-up workers, the table, and the picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from carma.errors import NotFound, Refused, Usage
from carma_lab.bench.gpu import collocation
from carma_lab.bench.gpu.collocation import Options
from carma_lab.bench.gpu.collocation_view import PUBLISHED, Point, points_of, relative_to_one
from carma_lab.bench.gpu.meter import Reading
from lab_fixtures.scripted_environment import ScriptedLab
from tests.scripted_nvml import Card

SMALL, LARGE = "resnet26-cifar10-b32", "resnet152-imagenet-b32"
RATES = {SMALL: {"rate": 100.0}, LARGE: {"rate": 5.0}}


def options(directory: Path, **given: Any) -> Options:
    return Options(json=str(directory / "points.json"), **{"seconds": 0.001, "copies": 3, **given})


def measured(directory: Path, machine: ScriptedLab | None = None, **given: Any) -> dict[str, Any]:
    assert collocation.run(options(directory, **given), machine or ScriptedLab(directory, RATES)) == 0
    table: dict[str, Any] = json.loads((directory / "points.json").read_text())
    return table


def series(table: dict[str, Any], task: str, mechanism: str) -> list[dict[str, Any]]:
    return [point for point in table["points"] if (point["task"], point["mechanism"]) == (task, mechanism)]


def test_every_task_is_measured_by_every_mechanism_from_one_copy_up(tmp_path: Path) -> None:
    machine = ScriptedLab(tmp_path, RATES)
    table = measured(tmp_path, machine)
    for task in ("small", "large"):
        for mechanism in ("timeslice", "mps"):
            assert [point["copies"] for point in series(table, task, mechanism)] == [1, 2, 3]
    assert len(table["points"]) == 12
    assert machine.shared == ["timeslice", "mps"] * 2
    assert len(machine.ticking.workers) == 12  # three copies a series: started once, not once a point
    assert machine.alive() == []
    assert any("mig" in line for line in table["left_out"])


def test_throughput_is_in_images_and_held_against_one_copy_time_sliced(tmp_path: Path) -> None:
    table = measured(tmp_path)
    naive, mps = series(table, "small", "timeslice"), series(table, "small", "mps")
    assert [point["images_per_s"] for point in naive] == [3200.0, 6400.0, 9600.0]
    assert [point["relative"] for point in naive] == [1.0, 2.0, 3.0]
    assert [point["relative"] for point in mps] == [1.5, 3.0, 4.5]
    assert naive[1]["each_images_per_s"] == [3200.0, 3200.0]
    assert naive[1]["step_ms"] == 10.0
    assert naive[1]["cpu"] == [0.5, 0.5]


def test_a_point_holds_what_the_gpu_showed(tmp_path: Path) -> None:
    point = series(measured(tmp_path), "large", "mps")[1]
    activity = [point[name] for name in ("sm_active", "sm_occupancy", "dram_active", "gr_active", "tensor_active")]
    assert activity == [0.25, 0.125, 0.06, 0.9, 0.03]
    assert (point["gpu_util"], point["power_w"]) == (0.97, 120.5)
    assert point["memory_mib"] == 2000  # of the two that ran; the third holds memory too and is not counted
    assert point["energy_j"] == 60.25  # the counter moved on by half a second of 120.5 W
    assert point["energy_per_image_j"] > 0


def test_energy_is_shared_out_over_the_images_of_the_span() -> None:
    reading = Reading(energy_j=800.0, seconds=4.0, memory_by_pid={7: 100, 8: 200, 9: 400})
    point = collocation._point("small", "mps", [{"rate": 2.0}, {"rate": 3.0}], reading, [7, 8])
    assert point.images_per_s == 160.0
    assert point.energy_per_image_j == pytest.approx(800 / 640)
    assert point.memory_mib == 300
    assert point.step_ms == pytest.approx((500 + 1000 / 3) / 2)


def test_processes_that_the_driver_does_not_name_leave_memory_unknown() -> None:
    point = collocation._point("small", "mps", [{"rate": 0.0}], Reading(energy_j=1.0, seconds=1.0), [7])
    assert (point.memory_mib, point.step_ms, point.energy_per_image_j) == (None, None, None)


def test_the_file_says_what_it_was_measured_on_how_and_what_was_published(tmp_path: Path) -> None:
    table = measured(tmp_path, mechanism=("timeslice", "mps"), task=("small",))
    assert (table["gpu"], table["driver"], table["torch"]) == ("NVIDIA H200", "580.159.04", "made up")
    assert "--copies 3 --task small --mechanism timeslice --mechanism mps --seconds 0.001" in table["command"]
    assert table["footprint_mib"] == {"small": {"timeslice": 1000, "mps": 1000}}
    assert table["tasks"] == {"small": SMALL}
    assert table["published"]["small"] == [5.35, 5.35]
    assert table["published"]["large"] == [1.15, 1.17]
    assert table["left_out"] == []
    assert "counter" in table["energy_from"]


def test_copies_that_do_not_fit_are_left_out_and_listed(tmp_path: Path) -> None:
    machine = ScriptedLab(tmp_path, RATES, Card("GPU-a", total_mib=45_604), footprint_mib=14_000)
    table = measured(tmp_path, machine, copies=8, task=("large",))
    assert [point["copies"] for point in series(table, "large", "mps")] == [1, 2, 3]
    assert "large, mps: 3 copies of 14,000 MiB fit; more are left out" in table["left_out"]
    assert len(machine.ticking.workers) == 6


def test_the_last_copy_that_fits_is_started(tmp_path: Path) -> None:
    machine = ScriptedLab(tmp_path, RATES, Card("GPU-a", total_mib=604 + 1000 + 1031), footprint_mib=1000)
    table = measured(tmp_path, machine, copies=2, task=("small",), mechanism=("timeslice",))
    assert [point["copies"] for point in table["points"]] == [1, 2]
    assert table["left_out"] == []


def test_a_task_that_cannot_start_leaves_the_other_one(tmp_path: Path) -> None:
    table = measured(tmp_path, ScriptedLab(tmp_path, {**RATES, LARGE: {"fail": "no torchvision"}}))
    assert {point["task"] for point in table["points"]} == {"small"}
    assert any("no torchvision" in line for line in table["left_out"])


def test_a_copy_that_dies_ends_its_series_and_not_the_study(tmp_path: Path) -> None:
    machine = ScriptedLab(tmp_path, {**RATES, SMALL: {"rate": 100.0, "die_at": 2}})
    table = measured(tmp_path, machine)
    assert [point["copies"] for point in series(table, "small", "timeslice")] == [1]
    assert [point["copies"] for point in series(table, "large", "mps")] == [1, 2, 3]
    assert any("from 2 copies on" in line and "CUDA error: made up" in line for line in table["left_out"])
    assert machine.alive() == []


def test_no_point_is_begun_when_the_time_is_over(tmp_path: Path) -> None:
    table = measured(tmp_path, limit_s=0.0)
    assert table["points"] == []
    assert any("s were over" in line for line in table["left_out"])


def test_a_series_is_broken_off_when_the_time_is_over(tmp_path: Path) -> None:
    class Slow(ScriptedLab):
        def together(self, *given: Any) -> Any:
            study._began -= 600.0
            return super().together(*given)

    study = collocation.CollocationStudy(options(tmp_path, limit_s=1000.0, task=("small",)), Slow(tmp_path, RATES))
    study.measure()
    assert [(point.mechanism, point.copies) for point in study.points] == [("timeslice", 1), ("timeslice", 2)]
    assert "small, timeslice, from 3 copies on: the 1000 s were over" in study.left_out


def test_without_mps_naive_copies_are_measured_all_the_same(tmp_path: Path) -> None:
    table = measured(tmp_path, ScriptedLab(tmp_path, RATES, has_mps=False))
    assert {point["mechanism"] for point in table["points"]} == {"timeslice"}
    assert any(line.startswith("mps is left out") for line in table["left_out"])


def test_a_mechanism_that_was_asked_for_by_name_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="MIG instances"):
        collocation.run(options(tmp_path, mechanism=("mig",)), ScriptedLab(tmp_path, RATES))
    with pytest.raises(Refused, match="nvidia-cuda-mps-control"):
        collocation.run(options(tmp_path, mechanism=("mps",)), ScriptedLab(tmp_path, RATES, has_mps=False))


def test_one_copy_runs_on_each_mig_instance(tmp_path: Path) -> None:
    instances = [Card(f"MIG-{name}", power_mw=0, energy_mj=0) for name in "abc"]
    machine = ScriptedLab(tmp_path, RATES, Card("GPU-a", mig=instances))
    table = measured(tmp_path, machine, copies=8, task=("small",))
    assert {point["mechanism"] for point in table["points"]} == {"mig"}
    assert [point["copies"] for point in table["points"]] == [1, 2, 3]
    assert [point["relative"] for point in table["points"]] == [1.0, 2.0, 3.0]
    assert [gpu.id for _, gpu in machine.ticking.workers] == ["MIG-a", "MIG-b", "MIG-c"]
    last = table["points"][-1]
    assert (last["sm_active"], last["memory_mib"]) == (0.25, 3000)
    assert last["energy_per_image_j"] is None  # the card's power would be counted three times
    assert sum("whole card" in line for line in table["left_out"]) == 2


def test_figures_that_the_card_does_not_give_are_absent_and_not_nought(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = {"nvmlDeviceGetPowerUsage": 3, "nvmlDeviceGetTotalEnergyConsumption": 3}
    old = Card("GPU-a", gpm=None, errors=errors)
    table = measured(tmp_path, ScriptedLab(tmp_path, RATES, old), task=("small",))
    for point in table["points"]:
        assert (point["sm_active"], point["power_w"], point["energy_per_image_j"]) == (None, None, None)
        assert point["images_per_s"] > 0
    assert " - " in capsys.readouterr().out


def test_ours_stands_beside_what_was_published(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured(tmp_path)
    printed = capsys.readouterr().out
    assert "small: here at best naive (time slicing) 3.00 x with 3, MPS 4.50 x with 3; published" in printed
    assert "up to 5.35 x" in printed
    assert "1.15 to 1.17 x" in printed


def test_relative_throughput_without_a_time_sliced_copy_is_against_the_mechanisms_own() -> None:
    points = [
        Point(task="small", mechanism="mps", copies=n, images_per_s=n * 7.0, each_images_per_s=(), step_ms=None)
        for n in (1, 2)
    ]
    assert [point.relative for point in relative_to_one(points)] == [1.0, 2.0]
    assert [point.relative for point in relative_to_one(points[1:])] == [None]


def test_a_picture_can_be_drawn_again_from_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    measured(tmp_path)
    picture = tmp_path / "points.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    again = tmp_path / "again.png"
    assert collocation.run(Options(redraw=str(tmp_path / "points.json"), plot=str(again))) == 0
    assert again.read_bytes().startswith(b"\x89PNG")
    assert "MPS 4.50 x" in capsys.readouterr().out


def test_without_matplotlib_the_figures_are_written_and_a_hint_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    table = measured(tmp_path)
    assert len(table["points"]) == 12
    assert not (tmp_path / "points.png").exists()
    printed = capsys.readouterr().out
    assert "pip install matplotlib &&" in printed
    assert f"--redraw {tmp_path / 'points.json'}" in printed


def test_what_is_written_can_be_read_back(tmp_path: Path) -> None:
    table = measured(tmp_path)
    head, points = points_of(str(tmp_path / "points.json"))
    assert len(points) == len(table["points"])
    assert "points" not in head
    assert PUBLISHED["gpu"] == head["published"]["gpu"]


POINT = '{"task": "TASK", "mechanism": "mps", "copies": 1, "images_per_s": 1, "each_images_per_s": [1], "step_ms": 1}'


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"rows": []}', '{"points": [{"task": 1}]}', "\udcff"),
        f'{{"points": [{POINT.replace("TASK", "gpu")}]}}',
        f'{{"tasks": 1, "points": [{POINT.replace("TASK", "small")}]}}',
    ],
)
def test_a_file_that_is_none_of_this_study_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(Refused, match=r"bad\.json") as told:
        collocation.run(Options(redraw=str(tmp_path / "bad.json")))
    assert told.value.exit_code == 1
    with pytest.raises(Refused, match=r"none/there\.json"):  # and not of the picture that would stand beside it
        collocation.run(Options(redraw=str(tmp_path / "none" / "there.json")))


def test_invalid_options_are_reported_before_any_measurement(tmp_path: Path) -> None:
    for given in (Options(json=str(tmp_path / "none" / "a.x")), options(tmp_path, plot=str(tmp_path / "none" / "a.x"))):
        with pytest.raises(Usage, match=r"none/a\.x"):
            collocation.run(given, ScriptedLab(tmp_path, RATES))
    with pytest.raises(Usage, match="'huge'"):
        collocation.run(options(tmp_path, task=("huge",)), ScriptedLab(tmp_path, RATES))
    with pytest.raises(NotFound, match="no GPU 9"):
        collocation.run(options(tmp_path, gpu="9"), ScriptedLab(tmp_path, RATES))
