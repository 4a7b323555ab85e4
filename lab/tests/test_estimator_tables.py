"""The tables of estimators are made from the files of results, and say what is in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from carma_lab.bench.machine import facts
from carma_lab.bench.memory.comparison_file import Comparison
from carma_lab.bench.memory.figures import Row, by_estimator
from carma_lab.bench.memory.published18 import PUBLISHED, errors
from carma_lab.bench.results_file import write
from lab.tools import estimator_tables
from tools import markdown as pages

MARKED = "before\n\n<!-- {mark}: made -->\nold figures\n<!-- end -->\n\nafter\n"


def _comparison(rows: tuple[Row, ...], caution: str = "") -> Comparison:
    return Comparison(
        command="carma bench estimators",
        source="truth.jsonl",
        gpu="NVIDIA H200",
        measured_on={},
        seed=0,
        level=0.99,
        caution=caution,
        whole=True,
        versions={},
        machine=facts(),
        estimators=by_estimator(rows),
        families=(),
        published=errors({row.case: row for row in rows}),
        rows=rows,
        judged=(),
    )


def _row(case: str, estimator: str, estimated_mib: float | None, bound_mib: float | None = None) -> Row:
    return Row(
        case=case,
        family="resnet",
        estimator=estimator,
        measured_mib=1000.0,
        took_s=4.26,
        estimated_mib=estimated_mib,
        bound_mib=bound_mib,
        refused=None if estimated_mib else "it ends at once",
    )


ROWS = (
    _row("a", "trace", 1010.0, 1050.0),
    _row("b", "trace", 940.0, 990.0),
    _row("c", "trace", None),
    _row("a", "horus", 2500.0),
)


def test_the_tables_are_as_in_the_files() -> None:
    for page, text in estimator_tables.pages().items():
        assert page.read_text(encoding="utf-8") == text, "make them again: python -m lab.tools.estimator_tables"


def test_a_line_has_the_figures_of_its_estimator() -> None:
    made = estimator_tables.estimators(_comparison(ROWS))
    assert "| `trace` | 2 of 3 | 3.5 % | " in made
    assert "| 50.0 % | 50.0 % | +2.0 % | 4.3 |" in made
    assert "| `horus` | 1 of 1 | 150.0 % | 150.0 % | 0.0 % | - | +150.0 % | 4.3 |" in made
    assert "Estimates of 3 training runs" in made
    assert "NVIDIA H200" in made


def test_what_the_figures_do_not_show_stands_beside_them() -> None:
    said = "2 of 3 runs were known before"
    assert said in " ".join(estimator_tables.estimators(_comparison(ROWS, said)).split())
    assert "do not know it" not in estimator_tables.estimators(_comparison(ROWS, said))
    assert "do not know it" in estimator_tables.estimators(_comparison(ROWS))


def test_the_published_models_stand_beside_our_estimates() -> None:
    first = PUBLISHED[0]
    made = estimator_tables.published18(_comparison((_row(first.run.id, "trace", 6500.0, 6900.4),)))
    assert "| VGG-16, 32 | 8,222 | 6,684 | 16,000 | 3,121 | 21,526 | 6,500 | 6,900 |" in made
    assert "| XLNet-base, 8 | 9,718 | - | 16,000 | - | 3,662 | - | - |" in made
    assert "| ours | measured | 1 | 1,722 MiB | 20.9 % | 1 |" in made


def test_a_table_stands_between_its_remarks_and_only_where_there_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for page, mark, _, _ in estimator_tables.PLACES:
        (tmp_path / page).write_text(MARKED.format(mark=mark))
    assert set(estimator_tables.pages(tmp_path, tmp_path).values()) == {
        MARKED.format(mark=mark).replace("old figures\n", "") for _, mark, _, _ in estimator_tables.PLACES
    }
    write(_comparison(ROWS), tmp_path / "estimators.json")
    made = estimator_tables.pages(tmp_path, tmp_path)[tmp_path / "docs" / "results.md"]
    assert made.startswith("before\n\n<!-- estimators: made -->\n\nEstimates of")
    assert made.endswith(" 4.3 |\n\n<!-- end -->\n\nafter\n")


def test_a_page_without_the_place_is_named() -> None:
    with pytest.raises(ValueError, match="no place for estimators"):
        pages.filled("nothing here", "estimators", "x")
