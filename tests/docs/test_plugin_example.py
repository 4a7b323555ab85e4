"""The plugins in docs/plugins.md are installed as packages would be, found by name, and pass the page's own tests."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest

from carma.config import LoadedSettings, describe, load_settings
from carma.core.model.decision import Ask
from carma.core.model.settings import Rules
from carma.core.model.values import ProcessUse, TaskId
from carma.core.scheduling.gpu_view import GpuView
from carma.core.scheduling.placement import Policy, decide
from carma.core.telemetry.window import Metric, Summary
from carma.errors import BadSettings
from carma.paths import find_paths
from carma.plugins import load_policy
from carma.testing.builders import gpu
from carma.testing.policy_contract import PolicyContract
from tests.docs.markdown import ROOT, blocks

PAGE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
MODULES = {
    block.info.split()[1]: f"{block.text}\n" for block in blocks(PAGE) if block.info.partition(" ")[0] == "python"
}
TESTS = [name for name in MODULES if name.startswith("test_")]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on the path with the page's modules, and their entry points as pip writes them."""
    registered: list[str] = []
    for block in blocks(PAGE):
        if block.info == "toml":
            for group, points in tomllib.loads(block.text)["project"]["entry-points"].items():
                registered += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    information = tmp_path / "carma_page-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: carma_page\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("\n".join(registered) + "\n")
    for name, text in MODULES.items():
        (tmp_path / name).write_text(text)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def policy(installed: Path) -> Policy:
    assert installed
    return load_policy("quiet-bus")


@pytest.mark.parametrize("test", TESTS)
def test_a_plugin_of_the_page_passes_its_tests(test: str, installed: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    ran = subprocess.run(
        command,
        cwd=installed,
        env={**os.environ, "PYTHONPATH": str(installed)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout


def test_the_page_tests_a_policy_an_estimator_and_a_verb() -> None:
    assert TESTS == ["test_quiet_bus.py", "test_from_name.py", "test_waiting.py"]


def _shared(index: int, dram: float | None) -> GpuView:
    """A GPU that a foreign process keeps busy."""
    metrics: tuple[Metric, ...] = ("sm_active", "sm_occupancy", "dram_active")
    flat = {name: Summary(5, 0.1, 0.1, 0.1) for name in metrics}
    if dram is not None:
        flat["dram_active"] = Summary(5, dram, dram, dram)
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
    assert "dram free 0.95" in decision.reason


# -- settings that a policy declares ---------------------------------------------------------------------------------
def roomy(
    installed: Path, flags: dict[str, object], environ: dict[str, str] | None = None
) -> tuple[int, LoadedSettings]:
    """What the policy keeps free with those settings, on a GPU with 40,000 MiB of room."""
    assert installed
    loaded = load_settings(None, environ or {}, {**flags, "placement.policy": "roomy"})
    policy = load_policy("roomy", loaded.settings.plugins).bound(loaded.settings.rules)
    view = _shared(0, 0.1)
    asks = (Ask(TaskId(1), 1, mib, "declared") for mib in range(40_000, 0, -1_000))
    largest = next(ask.memory_mib for ask in asks if policy.rank(ask, [view], None))
    return 40_000 - largest, loaded


@pytest.mark.parametrize(
    ("flags", "environ", "kept_mib", "origin"),
    [
        ({}, {}, 5_000, "default"),
        ({"roomy.keep_mib": "8000MiB"}, {}, 8_000, "flag --set roomy.keep_mib"),
        ({}, {"CARMA_ROOMY__KEEP_MIB": "12000"}, 12_000, "environment CARMA_ROOMY__KEEP_MIB"),
        ({"roomy.keep_mib": 0}, {"CARMA_ROOMY__KEEP_MIB": "12000"}, 0, "flag --set roomy.keep_mib"),
    ],
)
def test_settings_that_a_policy_declares_reach_it(
    flags: dict[str, object], environ: dict[str, str], kept_mib: int, origin: str, installed: Path
) -> None:
    found_mib, loaded = roomy(installed, flags, environ)
    assert found_mib == kept_mib
    (line,) = [line for line in describe(*loaded) if line.name.startswith("roomy.")]
    assert (line.name, line.origin) == ("roomy.keep_mib", origin)
    assert line.description == "Memory of a shared GPU that stays free, in MiB."


def test_a_section_of_a_file_with_the_name_of_a_policy_is_read(installed: Path, tmp_path: Path) -> None:
    paths = find_paths({"HOME": str(tmp_path), "CARMA_HOME": str(tmp_path / "carma")})
    paths.config_file.parent.mkdir(parents=True, exist_ok=True)
    paths.config_file.write_text('[placement]\npolicy = "roomy"\n[roomy]\nkeep_mib = "6GiB"\n')
    loaded = load_settings(paths, {})
    assert installed
    assert msgspec.to_builtins(loaded.settings.plugins) == {"roomy": {"keep_mib": 6 * 1024}}
    assert loaded.origins["roomy.keep_mib"] == str(paths.config_file)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("roomy.kepp_mib", 1, "did you mean 'roomy.keep_mib'?"),
        ("roomy.keep_mib", -1, "it must be a size in MiB of at least 0, or with its unit, such as 12GiB"),
        ("roomy.keep_mib", "much", "it must be a size in MiB of at least 0, or with its unit, such as 12GiB"),
        ("quiet-bus.keep_mib", 1, "there is no setting 'quiet-bus.keep_mib'"),
        ("romy.keep_mib", 1, "there is no setting 'romy.keep_mib'"),
    ],
)
def test_settings_of_a_policy_are_validated_like_those_of_carma(
    name: str, value: object, told: str, installed: Path
) -> None:
    assert installed
    with pytest.raises(BadSettings) as caught:
        load_settings(None, {}, {name: value})
    assert told in str(caught.value)


@pytest.mark.parametrize("name", ["quiet-bus", "roomy"])
def test_policies_of_the_page_keep_the_contract(name: str, installed: Path) -> None:
    assert installed

    class Contract(PolicyContract):
        policy = load_policy(name)

    for test in (member for member in dir(Contract) if member.startswith("test_")):
        getattr(Contract(), test)()


def test_it_is_as_short_as_the_page_says() -> None:
    assert len(MODULES["carma_quiet_bus.py"].splitlines()) <= 42
    assert "forty lines" in PAGE
