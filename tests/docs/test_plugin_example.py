"""The policy in docs/plugins.md is installed as a package would be, loaded by its name, and used to decide."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from carma.core.model.settings import Rules
from carma.core.model.values import ProcessUse, TaskId
from carma.core.scheduling.decision import Ask
from carma.core.scheduling.gpu_view import GpuView
from carma.core.scheduling.placement import Policy, decide
from carma.core.telemetry.window import Metric, Summary
from carma.plugins import load_policy
from carma.testing.builders import gpu
from tests.docs.markdown import ROOT, blocks

PAGE = ROOT / "docs" / "plugins.md"
MODULE = "carma_quiet_bus"


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Policy:
    page = blocks(PAGE.read_text(encoding="utf-8"))
    (code,) = [block.text for block in page if block.info == "python"]
    (registration,) = [block.text for block in page if block.info == "toml"]
    (group, points), *rest = tomllib.loads(registration)["project"]["entry-points"].items()
    assert (group, rest) == ("carma.policies", [])
    information = tmp_path / f"{MODULE}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {MODULE}\nVersion: 1.0\n")
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (information / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / f"{MODULE}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    return load_policy("quiet-bus")


def _shared(index: int, dram: float | None) -> GpuView:
    """A GPU that somebody else's process keeps busy."""
    metrics: tuple[Metric, ...] = ("sm_active", "sm_occupancy", "dram_active")
    flat = {name: Summary(5, 0.1, 0.1, 0.1, 0.1, 0.0, 0.1) for name in metrics}
    if dram is not None:
        flat["dram_active"] = Summary(5, dram, dram, dram, dram, 0.0, dram)
    else:
        del flat["dram_active"]
    process = ProcessUse(pid=1, memory_mib=100)
    return GpuView(
        gpu=gpu(index), foreign=(process,), foreign_mib=100, used_mib=100, room_mib=40_000 + index, summaries=flat
    )


def test_the_example_ranks_by_what_it_says(policy: Policy) -> None:
    views = [_shared(0, 0.30), _shared(1, 0.05), _shared(2, None), _shared(3, 0.05)]
    ask = Ask(TaskId(1), 1, 1024, "declared")
    ranked = [entry.gpu for entry in policy.rank(ask, views, None)]
    assert ranked == ["GPU-3", "GPU-1", "GPU-0", "GPU-2"]  # room decides the tie; what is not known is the worst


def test_the_example_decides(policy: Policy) -> None:
    ask = Ask(TaskId(1), 1, 1024, "declared")
    decision = decide(ask, [_shared(0, 0.30), _shared(1, 0.05)], Rules(), policy, None, 1000.0)
    assert decision.policy == "quiet-bus"
    assert decision.placement is not None
    assert decision.placement.gpus == ("GPU-1",)
    assert "dram_free 0.95" in decision.reason


def test_it_is_as_short_as_the_page_says() -> None:
    (code,) = [block.text for block in blocks(PAGE.read_text(encoding="utf-8")) if block.info == "python"]
    assert len(code.splitlines()) <= 42
    assert "forty lines" in PAGE.read_text(encoding="utf-8")
