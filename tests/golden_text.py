"""Golden files of wording: one file for each area in tests/wording, so that a better sentence changes one file.

A test passes the sentences that it collected, by name. To accept new wording, run the test once with `-n0` and
CARMA_WRITE_WORDING=1 in the environment, and read the difference before you commit it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

DIRECTORY = Path(__file__).parent / "wording"


def assert_wording(area: str, sentences: Mapping[str, str]) -> None:
    """Compares with tests/wording/AREA.txt: a line `== name ==` before each text."""
    text = "".join(f"== {name} ==\n{sentence.rstrip()}\n\n" for name, sentence in sentences.items())
    file = DIRECTORY / f"{area}.txt"
    if os.environ.get("CARMA_WRITE_WORDING") == "1":
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), f"the wording differs from {file}; see tests/golden_text.py"
