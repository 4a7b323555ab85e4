"""What comes after the steps: an evaluation with larger batches is seen, and nothing there loses the report."""

from __future__ import annotations

from tests.estimating.trying import Trying, peak_bytes, stepped

_UNSEEN = "saw no evaluation"


def test_a_larger_batch_after_the_epoch_counts(trying: Trying) -> None:
    with_it, without = trying.python("evaluation.py"), trying.python("evaluation.py", "--without")
    assert with_it.report.steps == without.report.steps == 3
    assert "evaluation" in with_it.report.flags
    assert "eval" in with_it.report.marks
    assert peak_bytes(with_it) > 2 * peak_bytes(without)
    assert not any(_UNSEEN in warning for warning in with_it.report.warnings)
    assert [_UNSEEN in warning for warning in without.report.warnings].count(True) == 1


def test_an_evaluation_that_fails_leaves_the_report_of_the_steps(trying: Trying) -> None:
    broken, without = trying.python("evaluation.py", "--broken"), trying.python("evaluation.py", "--without")
    assert any(_UNSEEN in warning for warning in broken.report.warnings)
    assert any("RuntimeError" in warning for warning in broken.report.warnings)
    assert peak_bytes(broken) == peak_bytes(without)


_INLINE = """
import torch
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(2048, 256))
model = torch.nn.Sequential(torch.nn.Linear(256, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(1000):
    for i, (x,) in enumerate(DataLoader(data, 64)):
        optimizer.zero_grad()
        model(x.cuda()).sum().backward()
        optimizer.step()
    with torch.no_grad():
        for i, (x,) in enumerate(DataLoader(data, EVALUATED)):
            model(x.cuda())
"""


def test_loaders_that_are_made_in_the_loop(trying: Trying) -> None:
    small, large = (stepped(trying.script(_INLINE.replace("EVALUATED", size))) for size in ("64", "1024"))
    assert "evaluation" in large.report.flags
    assert peak_bytes(large) > 2 * peak_bytes(small)
    assert not any(_UNSEEN in warning for warning in large.report.warnings)
