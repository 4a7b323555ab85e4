"""Pictures and pages: the same bytes each time, nothing from elsewhere, what is unknown left out."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from carma.errors import Refused, Usage
from carma_lab.reports import compare_pictures, pages, pictures
from carma_lab.reports.compare import compare
from carma_lab.reports.drawing import inline, save, span_unit, styled
from carma_lab.reports.gantt import bars, gantt
from carma_lab.reports.summary import summary
from carma_lab.runs.figures import Ran
from carma_lab.runs.record import Run
from lab_fixtures.recorded_runs import about, point, run, task

CRASH = Ran(gpus=(0,), placed_at=10.0, ended_at=12.0, outcome="out_of_memory")
SMALL = run(
    task(1, 0.0, 0.0, 300.0, alone_s=250.0, user="ana"),
    task(2, 5.0, 20.0, 220.0, user="<b>ben</b>", before=[CRASH]),
    course=[point(30.0 * place, power_w=None) for place in range(1, 11)],
    energy_j=None,
)


def test_each_picture_is_a_png_and_an_svg_and_always_the_same_bytes(tmp_path: Path) -> None:
    first = save(pictures.pictures(SMALL), tmp_path / "first")
    again = save(pictures.pictures(SMALL), tmp_path / "again")
    names = [f"{name}.{kind}" for name in ("course", "spread", "gantt") for kind in ("png", "svg")]
    assert [path.name for path in first] == names
    for one, other in zip(first, again, strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name
    assert first[0].read_bytes().startswith(b"\x89PNG")
    text = first[1].read_text()
    ElementTree.fromstring(text)
    assert not re.search(r"dc:date|\b20\d\d-\d\d", text)


def labels(made: Run) -> list[str]:
    with styled("test"):
        return [axes.get_ylabel() for axes in pictures.course(made).axes]


def test_an_unmeasured_metric_has_no_panel() -> None:
    assert labels(SMALL) == ["activity (%)", "memory (GiB)", "tasks"]
    blind = [
        point(at, sm_active=None, sm_occupancy=None, dram_active=None, memory_mib=None, power_w=None) for at in (1, 2)
    ]
    assert labels(run(task(1, 0.0, 0.0, 2.0), course=blind)) == ["tasks"]


def test_the_spread_of_a_run_without_times_alone_has_no_slowdown() -> None:
    with styled("test"):
        drawn = pictures.spread(run(task(1, 0.0, 0.0, 7.0, alone_s=None)))
    assert [axes.get_xlabel() for axes in drawn.axes] == ["completion (seconds)", "wait (seconds)"]


def test_attempts_on_a_gpu_at_the_same_time_are_beside_one_another() -> None:
    found = bars(
        [
            task(1, 50.0, 50.0, 150.0),
            task(2, 50.0, 60.0, 100.0),
            task(3, 50.0, 100.0, 200.0),
            task(4, 50.0, 60.0, 70.0, gpu=1),
        ]
    )
    assert [(bar.task, bar.gpu, bar.lane, bar.begin_s) for bar in found] == [
        (1, 0, 0, 0.0),
        (2, 0, 1, 10.0),
        (3, 0, 1, 50.0),
        (4, 1, 0, 10.0),
    ]


def test_of_many_tasks_the_first_are_drawn_and_the_title_says_so() -> None:
    many = run(*(task(place + 1, float(place), float(place), place + 1.0) for place in range(230)))
    with styled("test"):
        (axes,) = gantt(many).axes
    assert axes.get_title(loc="left").endswith("the first 200 of 230 tasks")
    assert len(axes.patches) == 200


def test_time_is_marked_in_what_fits() -> None:
    assert [span_unit(seconds)[1] for seconds in (90, 600, 40_000, 900_000)] == ["seconds", "minutes", "hours", "days"]


def test_a_page_is_whole_and_follows_the_readers_colours() -> None:
    text = pages.run_page(summary(SMALL), pictures.pictures(SMALL))
    assert text.count("<svg") == 3
    assert "prefers-color-scheme: dark" in text
    assert "currentColor" in text
    assert not re.search(r"<script|<link|<img|src=|@import|url\((?!#)", text)
    assert set(re.findall(r'https?://[^"]*', text)) == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "<b>ben</b>" not in text
    assert "&lt;b&gt;ben&lt;/b&gt;" in text
    assert "<td>out of memory</td>" in text
    assert pages.run_page(summary(SMALL), pictures.pictures(SMALL)) == text


def test_pictures_in_a_page_share_no_names_but_those_of_equal_things() -> None:
    for picture in pictures.pictures(SMALL):
        tree = ElementTree.fromstring(inline(picture))
        assert tree.get("aria-label") == picture.about
        assert (tree.get("width"), tree.get("viewBox") is not None) == (None, True)
        assert not [one.get("id") for one in tree.iter("{http://www.w3.org/2000/svg}g") if one.get("id")]


def test_a_comparison_has_bars_and_a_cloud(tmp_path: Path) -> None:
    runs = [
        run(task(1, 0.0, 0.0, seconds), of=about(policy=policy, trace=trace))
        for trace, policy, seconds in (("a", "one", 90.0), ("a", "two", 60.0), ("b", "one", 80.0), ("b", "two", 70.0))
    ]
    found = compare(runs)
    written = save(compare_pictures.pictures(found), tmp_path)
    assert [path.name for path in written] == ["bars.png", "bars.svg", "cloud.png", "cloud.svg"]
    with styled("test"):
        first, *_, last = compare_pictures.bars(found).axes
        cloud = compare_pictures.cloud(found).axes[0]
    assert sorted(round(patch.get_height(), 3) for patch in first.patches) == [0.667, 0.764, 0.875, 1.0, 1.0, 1.0]
    assert [tick.get_text() for tick in last.get_xticklabels()] == ["a", "b", "geo-mean"]
    assert cloud.get_xlabel() == "makespan (one = 1)"
    text = pages.comparison_page(found, compare_pictures.pictures(found))
    assert text.count("<svg") == 2
    assert "<h1>one and two</h1>" in text


def test_long_names_stand_above_a_cloud_and_leave_it_its_width() -> None:
    def width(second: str) -> float:
        runs = [run(task(1, 0.0, 0.0, 9.0), of=about(policy=policy)) for policy in ("one", second)]
        with styled("test"):
            drawn = compare_pictures.cloud(compare(runs))
            drawn.savefig(io.BytesIO(), format="png")
        (legend,) = drawn.legends
        assert [text.get_text() for text in legend.get_texts()] == ["one", second]
        return float(drawn.axes[0].get_position().width)

    assert width("a-policy-that-somebody-has-given-a-name-that-takes-half-of-a-line") > width("two")


def test_without_slowdowns_there_is_no_cloud() -> None:
    runs = [run(task(1, 0.0, 0.0, 9.0, alone_s=None), of=about(policy=policy)) for policy in ("one", "two")]
    assert [picture.name for picture in compare_pictures.pictures(compare(runs))] == ["bars"]


def test_without_matplotlib_the_hint_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Refused, match="matplotlib is not installed") as caught:
        save(pictures.pictures(SMALL), tmp_path)
    assert "pip install matplotlib" in caught.value.hint


def test_a_file_where_a_directory_is_wanted_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Usage, match="cannot be made"):
        save(pictures.pictures(SMALL), tmp_path / "file" / "below")
    with pytest.raises(Refused, match="cannot be written"):
        pages.write_text("", tmp_path / "file" / "page.html")
