"""What the page says of the sharing model's errors is in the file of results."""

from __future__ import annotations

import json

import pytest

from lab.tools import sharing_tables


def test_the_page_is_up_to_date() -> None:
    for page, text in sharing_tables.pages().items():
        assert page.read_text(encoding="utf-8") == text, "python -m lab.tools.sharing_tables"


@pytest.mark.parametrize("mark", sharing_tables.MARKS)
def test_a_figure_that_changes_in_the_file_changes_on_the_page(mark: str) -> None:
    text = sharing_tables.RESULTS.read_text(encoding="utf-8")
    found = json.loads(text, parse_float=float)
    other = json.loads(text, parse_float=lambda number: float(number) / 2 + 0.111)
    assert sharing_tables.MARKS[mark](found) != sharing_tables.MARKS[mark](other)
