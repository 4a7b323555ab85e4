"""What every policy decides on two small traces is kept in lab/tests/golden; another decision, or another word,
shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.tools import golden
from lab_fixtures.random_simulations import EVERY_POLICY

MOST_BYTES = 40_000  # of all files: their differences are reviewed by hand


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_a_policy_decides_as_it_did(policy: str) -> None:
    found = golden.difference(policy)
    assert not found, "\n".join([*found, "", f"If these decisions are meant, keep them: {golden.WRITE}"])


def test_the_kept_logs_are_few_small_and_all_of_policies() -> None:
    assert golden.strangers() == []
    sizes = [file.stat().st_size for file in golden.GOLDEN.glob("*.txt")]
    assert len(sizes) == len(EVERY_POLICY)
    assert sum(sizes) < MOST_BYTES


def test_every_task_of_both_traces_is_in_a_log() -> None:
    text = (golden.GOLDEN / "goodput.txt").read_text(encoding="utf-8")
    for (title, trace, _), part in zip(golden.cases("goodput"), text.split("# goodput: ")[1:], strict=True):
        assert part.startswith(title)
        assert {line.split()[1].split(".")[0] for line in part.splitlines()[1:]} == {
            str(place + 1) for place in range(len(trace.tasks))
        }


def test_a_log_that_differs_is_shown_with_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "exclusive.txt"
    assert golden.difference("exclusive", tmp_path) == ["exclusive.txt is not there"]
    file.write_text(golden.log_of("exclusive"), encoding="utf-8")
    assert golden.difference("exclusive", tmp_path) == []
    lines = file.read_text(encoding="utf-8").splitlines()
    file.write_text("\n".join([lines[0], lines[1] + "!", *lines[2:]]) + "\n", encoding="utf-8")
    found = golden.difference("exclusive", tmp_path)
    assert f"-{lines[1]}!" in found
    assert f"+{lines[1]}" in found
    file.write_bytes("\r\n".join(lines).encode())
    assert golden.difference("exclusive", tmp_path), "byte by byte"
