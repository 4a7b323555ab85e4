"""GPUMemNet's figures come from the files of results, the models' facts and the program, and say what is in them."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from carma_lab.bench import gpumemnet as speedbench
from carma_lab.bench.machine import facts as machine
from carma_lab.bench.memory.comparison_file import Comparison
from carma_lab.bench.memory.figures import Row, by_estimator
from carma_lab.bench.results_file import write as write_comparison
from gpumemnet.dataset.config import Config
from gpumemnet.training.accuracy_report import Bound, Data, Entry, Judged, Report, write
from gpumemnet.training.scores import Errors, judge
from gpumemnet_fixtures import gpumemnet_models as tiny
from lab.tools import gpumemnet_accuracy, gpumemnet_tables
from tests.docs.markdown import ROOT, blocks

MARKED = "before\n\n<!-- {mark}: made -->\nold figures\n<!-- end -->\n\nafter\n"
TRUTH = np.array([0, 0, 0, 1, 1, 1, 2, 5, 6, 7])
FOUND = np.array([0, 0, 1, 1, 1, 0, 2, 5, 5, 7])  # one too high, two too low, of which one is above 40 GB


def _judged(point: str, width_gb: int, *, merged: bool = False) -> Judged:
    classes = judge(TRUTH, FOUND, width_gb, merged=merged)
    return Judged(point=point, classes=classes, of_split={"residual": (0.5, 0.25), "dense": (0.9, 0.0)})


def _entry(data: str, learner: str, protocol: str = "folds") -> Entry:
    family = "cnn" if data == "cnn" else "mlp"
    width = 8 if family == "cnn" else 1
    names = ("class",) if learner == "published" else ("median", "operating", "careful")
    judged = [_judged(name, width) for name in names]
    if family == "cnn" and learner != "published":
        judged.append(_judged("operating", width, merged=True))
    errors = Errors(mean_mib=1234.4, mean_share=0.1, median_share=0.0712, worst_under_mib=-9.0, worst_over_mib=9.0)
    return Entry(
        data=data,
        family=family,
        learner=learner,
        protocol="shapes" if protocol == "shapes" else "folds",
        rows=len(TRUTH),
        judged=tuple(judged),
        errors=None if learner == "published" else errors,
        coverage={},
        bounds=() if learner == "published" else (Bound(level=0.99, held=0.987, over_share=0.801),),
        curves={},
        took_s=1.0,
    )


REPORT = Report(
    command="carma train gpumemnet/datasets/h200/cnn.parquet --evaluate",
    seed=7,
    date="2026-01-02",
    versions={"torch": "2.13.0"},
    cores=2,
    data={
        "cnn": Data(
            rows=10, gpu="NVIDIA H200", sha256={}, left_out={"out of memory": 3}, footprints_mib=(700.0, 62_000.0)
        )
    },
    entries=(
        _entry("public-mlp", "mlp-based"),
        _entry("cnn", "published"),
        _entry("cnn", "mlp-based"),
        _entry("cnn", "mlp-based", "shapes"),
    ),
)


def test_the_pages_are_as_in_the_files() -> None:
    for page, text in gpumemnet_tables.pages().items():
        assert page.read_text(encoding="utf-8") == text, "make them again: python -m lab.tools.gpumemnet_tables"


def test_ours_stands_beside_what_was_published() -> None:
    made = gpumemnet_accuracy.published(REPORT)
    # 40 GB and more are one class there, so that the run of 48 GB that was answered with 40 GB counts as right.
    own, aim = "80.0 %, 10.0 % too low", "95.0 %, 1.0 % too low"
    assert f"| CNN | mlp-based | 8 GB | 82.0 %, 7.2 % too low | - | {own} | {aim} |" in made
    same = "70.0 %, 20.0 % too low"
    assert f"| MLP | mlp-based | 1 GB | 95.0 %, 1.8 % too low | {same} | - | 99.0 %, 1.0 % too low |" in made
    assert "| Transformer | transformer-based | 8 GB | 85.0 %, 6.4 % too low | - | - | " in made


def test_every_learner_is_there_in_the_order_of_the_list() -> None:
    made = gpumemnet_accuracy.learners(REPORT)
    own = made.index("| CNN | mlp-based | 8 GB | 70.0 % | 20.0 % | 10.0 % | ")
    recipe = made.index("| CNN | published | 8 GB | 70.0 % | ")
    public = made.index("| MLP, public (A100) | mlp-based | 1 GB | ")
    assert own < recipe < public
    assert made.count("1,234 MiB | 7.1 %") == 2  # a classifier gives no figure in MiB


def test_the_short_table_is_of_what_ships_and_of_our_own_data() -> None:
    made = gpumemnet_accuracy.short(REPORT)
    assert "| CNN | `gpumemnet` | 10 | 7.1 % | 10.0 % | 98.7 % | 70.0 % | 20.0 % |" in made
    assert "published" not in made
    assert "public" not in made


def test_points_shapes_bounds_classes_and_data() -> None:
    points = gpumemnet_accuracy.points(REPORT)
    assert [points.count(f"| {name} |") for name in ("the median", "chosen", "careful")] == [2, 2, 2]
    worst = "residual: 50.0 % right, 25.0 % too low"
    assert f"| 70.0 % | 20.0 % | 10.0 % | {worst} |" in gpumemnet_accuracy.shapes(REPORT)
    assert gpumemnet_accuracy.shapes(replace(REPORT, entries=REPORT.entries[:3])) == ""
    assert "| CNN | mlp-based | 99.0 % | 98.7 % | +80.1 % |" in gpumemnet_accuracy.bounds(REPORT)
    classes = gpumemnet_accuracy.classes(REPORT)
    assert "| CNN | mlp-based | 8–16 GB | 3 | 66.7 % | 66.7 % | 0.67 |" in classes
    assert "| CNN | mlp-based | 40 GB and more | 3 | 100.0 % | 100.0 % | 1.00 |" in classes
    assert "| CNN | 10 | NVIDIA H200 | 700 to 62,000 MiB | 3: out of memory |" in gpumemnet_accuracy.data(REPORT)


def test_the_command_stands_with_the_figures(tmp_path: Path) -> None:
    write(REPORT, tmp_path / "accuracy.json")
    (place,) = [place for place in gpumemnet_tables.PLACES if place.mark == "published"]
    made = place.make(tmp_path)
    assert "seed 7" in made
    assert "\n    carma train gpumemnet/datasets/h200/cnn.parquet --evaluate\n" in made


def test_speed(tmp_path: Path) -> None:
    timings = [
        speedbench.Timing(part=part, of="GPT2-XL", layers=9, median_ms=1.234, p95_ms=2.0, published_ms=published)
        for part, published in (("parser", (1.77, 1.77)), ("inference", (2.25, 2.4)), ("session", None))
    ]
    report = speedbench.Report(
        command="x", machine=machine(), versions={}, threads=1, runs=400, limit_ms=2.0, timings=tuple(timings)
    )
    (tmp_path / "speed.json").write_bytes(msgspec.json.encode(report))
    made = gpumemnet_tables.speed(tmp_path)
    assert "| parser | GPT2-XL | 9 | 1.23 ms | 2.00 ms | 1.77 ms |" in made
    assert "| 2.25–2.4 ms |" in made
    assert "| session | GPT2-XL | 9 | 1.23 ms | 2.00 ms | - |" in made
    assert "400 repetitions" in " ".join(made.split())
    assert made.endswith("\nAll times are within the aim.\n")
    for load, is_said in ((0.1, False), (3.0, True)):
        told = replace(report, machine=replace(report.machine, load_before=load))
        (tmp_path / "speed.json").write_bytes(msgspec.json.encode(told))
        assert ("The machine was busy: load 3" in gpumemnet_tables.speed(tmp_path)) is is_said
    slow = replace(timings[1], median_ms=2.5)
    (tmp_path / "speed.json").write_bytes(msgspec.json.encode(replace(report, timings=(timings[0], slow))))
    assert gpumemnet_tables.speed(tmp_path).endswith("\nSlower than the aim: inference of GPT2-XL.\n")


def test_models_that_people_use(tmp_path: Path) -> None:
    rows = tuple(
        Row(case=case, family="vgg", estimator="gpumemnet", measured_mib=1000.0, took_s=0.1, estimated_mib=mib)
        for case, mib in (("a", 1100.0), ("b", 800.0))
    )
    comparison = Comparison(
        command="x", source="truth.jsonl", gpu="NVIDIA H200", measured_on={}, seed=0, level=0.99, whole=True,
        versions={}, machine=machine(), estimators=by_estimator(rows), families=(), rows=rows, judged=(),
    )  # fmt: skip
    write_comparison(comparison, tmp_path / "zoo.json")
    made = gpumemnet_tables.zoo(tmp_path)
    assert "| gpumemnet | 2 of 2 | 15.0 % | " in made
    assert "| -20.0 % | 50.0 % | 50.0 % | - | " in made
    assert made.startswith("2 training runs")


def test_ranges_are_those_of_the_models_as_people_write_them(tmp_path: Path) -> None:
    assert gpumemnet_tables.ranges(tmp_path, tmp_path) == ""
    tiny.save(tmp_path, tiny.facts())  # batches of 1 to 16,383
    assert "| MLP | 1 to 16,383 | " in gpumemnet_tables.ranges(tmp_path, tmp_path)


def test_pictures_that_are_there_are_named(tmp_path: Path) -> None:
    (tmp_path / "confusion-mlp-2gb.png").touch()
    assert gpumemnet_tables.pictures(tmp_path) == "- [mlp 2gb](confusion-mlp-2gb.png)\n"


def test_nothing_is_said_without_a_file(tmp_path: Path) -> None:
    of_files = tuple(place for place in gpumemnet_tables.PLACES if place.mark not in ("example", "ranges"))
    for page in {place.page for place in of_files}:
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        marks = [place.mark for place in of_files if place.page == page]
        (tmp_path / page).write_text("".join(MARKED.format(mark=mark) for mark in marks))
    empty = tmp_path / "empty"
    assert all("old figures" not in text for text in gpumemnet_tables.pages(tmp_path, empty, of_files).values())
    assert all("| --- |" not in text for text in gpumemnet_tables.pages(tmp_path, empty, of_files).values())
    write(REPORT, empty / "accuracy.json")
    made = gpumemnet_tables.pages(tmp_path, empty, of_files)[tmp_path / gpumemnet_tables.PAGE]
    assert re.search(r"<!-- short: made -->\n\n\| networks .*\|\n\n<!-- end -->", made, re.DOTALL)


def test_the_example_asks_only_where_there_are_models(tmp_path: Path) -> None:
    assert gpumemnet_tables.example(tmp_path, tmp_path) == ""


def test_the_pages_config_can_be_read() -> None:
    """And is what the generator would have written, but for blanks and defaults."""
    page = (ROOT / gpumemnet_tables.TRAINING_PAGE).read_text(encoding="utf-8")
    (text,) = [block.text for block in blocks(page) if block.info == "json"]
    assert msgspec.json.decode(text.encode(), type=Config).shape == "residual"


def test_the_pages_features_and_files_are_there() -> None:
    page = (ROOT / gpumemnet_tables.TRAINING_PAGE).read_text(encoding="utf-8")
    named = re.findall(r"^\| `([\w/]+\.py)` \|", page, re.MULTILINE)
    assert len(named) == 8
    for name in named:
        assert any((ROOT / source / name).exists() for source in ("src", "gpumemnet/src")), name


@pytest.mark.parametrize("mark", [place.mark for place in gpumemnet_tables.PLACES])
def test_each_place_is_once_in_its_page(mark: str) -> None:
    (place,) = [place for place in gpumemnet_tables.PLACES if place.mark == mark]
    assert (ROOT / place.page).read_text(encoding="utf-8").count(f"<!-- {mark}: ") == 1
