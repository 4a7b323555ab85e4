"""The ranges file: complete, and a mistake in one's own names the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from carma.errors import Usage
from gpumemnet.dataset.ranges import Ranges, load_ranges


def loaded(tmp_path: Path, text: str) -> Ranges:
    path = tmp_path / "own.toml"
    path.write_text(text)
    return load_ranges(path)


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert loaded(tmp_path, "") == load_ranges()


def test_a_table_of_words_is_replaced_and_a_section_is_not(tmp_path: Path) -> None:
    ranges = loaded(tmp_path, "[cnn]\nnorms = { group = 1 }\n[cnn.footprint]\nlog = 0.9\nlow = 0.0\nhigh = 0.1\n")
    defaults = load_ranges()
    assert ranges.cnn.norms == {"group": 1}
    assert ranges.cnn.footprint.log == 0.9
    assert ranges.cnn.footprint.span_mib == defaults.cnn.footprint.span_mib
    assert ranges.cnn.activations == defaults.cnn.activations


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[cnn]\nbach = [1, 2]\n", "`bach`"),
        ("[cnn]\nbatch = [8, 2]\n", "`batch` begins with 8 and ends with 2"),
        ("[cnn]\nbatch = [0, 2]\n", r"\$\.cnn\.batch"),
        ("[mlp]\nnorms = { bach = 1 }\n", r"\$\.mlp\.norms"),
        ("[mlp]\nnorms = { batch = 0 }\n", "`norms`"),
        ("[mlp]\ndropout = 2.0\n", r"\$\.mlp\.dropout"),
        ("[cnn]\nimages = []\n", "`images` is empty"),
        ("[transformer.footprint]\nlog = -1.0\n", r"\$\.transformer\.footprint\.log"),
        ("[common]\ntries = 0\n", r"\$\.common\.tries"),
        ("[rnn]\nlayers = 3\n", "`rnn`"),
        ("cnn = 3\n", r"\$\.cnn"),
        ("[cnn\n", "is not TOML"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(Usage, match=named) as caught:
        loaded(tmp_path, text)
    assert "own.toml" in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(Usage, match=r"none\.toml"):
        load_ranges(tmp_path / "none.toml")
