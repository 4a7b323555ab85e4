"""The data card has the columns of the files and the figures that are in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from carma.errors import Usage
from gpumemnet.dataset.schema import COLUMNS
from lab.tools import dataset_card

MARKED = "# Card\n\n<!-- columns: made -->\nold\n<!-- end -->\n\n<!-- figures: made -->\nold figures\n<!-- end -->\n"


def test_the_card_is_as_the_files_are() -> None:
    made = dataset_card.page()
    assert dataset_card.CARD.read_text(encoding="utf-8") == made, "make it again: python -m lab.tools.dataset_card"


def test_the_card_describes_every_column_and_has_no_figure_without_a_file(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(MARKED)
    made = dataset_card.page(tmp_path / "README.md")
    for column in COLUMNS:
        assert f"| `{column.name}` | " in made
    assert "<!-- figures: made -->\n<!-- end -->" in made


def test_a_file_that_is_there_is_read(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(MARKED)
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "cnn.parquet").write_text("nonsense, and long enough for a footer")
    with pytest.raises(Usage, match=r"cnn\.parquet"):
        dataset_card.page(tmp_path / "README.md")
