"""What comes after the steps: an evaluation with larger batches is seen, and nothing there loses the report."""

from __future__ import annotations

from tests.estimating.trying import Trying, peak_bytes

_UNSEEN = "no evaluation was seen"


def test_a_larger_batch_after_the_epoch_counts(trying: Trying) -> None:
    with_it, without = trying.python("evaluation.py"), trying.python("evaluation.py", "--without")
    assert with_it.report.steps == without.report.steps == 3
    assert "evaluation" in with_it.report.flags
    assert "eval" in with_it.report.marks
    assert peak_bytes(with_it) > 2 * peak_bytes(without)
    assert not any(_UNSEEN in warning for warning in (*with_it.report.warnings, *without.report.warnings))


def test_an_evaluation_that_fails_leaves_the_report_of_the_steps(trying: Trying) -> None:
    broken, without = trying.python("evaluation.py", "--broken"), trying.python("evaluation.py", "--without")
    assert any(_UNSEEN in warning for warning in broken.report.warnings)
    assert any("RuntimeError" in warning for warning in broken.report.warnings)
    assert peak_bytes(broken) == peak_bytes(without)
