"""Plugins from real packages on the path: found by name, imported late, and named when they fail."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from carma.core.scheduling.placement import Policy
from carma.errors import BadSettings, PluginError
from carma.plugins import ESTIMATORS, POLICIES, load, load_one, load_policy, names, policy_name

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a package with entry points on the path, as pip would."""

    def put(package: str, entry_points: str, code: str) -> None:
        site = tmp_path / package
        information = site / f"{package}-1.0.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (information / "entry_points.txt").write_text(entry_points)
        (site / f"{package}.py").write_text(code)
        monkeypatch.syspath_prepend(site)
        monkeypatch.delitem(sys.modules, package, raising=False)

    return put


def test_the_built_in_ones_are_registered_like_any_other() -> None:
    assert {"exclusive", "round-robin", "first-fit", "best-fit", "magm", "lug"} <= set(names(POLICIES))
    assert {"declared", "history"} <= set(names(ESTIMATORS))


def test_every_built_in_policy_loads_under_its_own_name() -> None:
    for name in ("exclusive", "round-robin", "first-fit", "best-fit", "magm", "lug"):
        assert load_policy(name).name == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("RR", "round-robin"),
        ("ff", "first-fit"),
        ("BF", "best-fit"),
        ("MAGM", "magm"),
        ("Lug", "lug"),
        ("Exclusive", "exclusive"),
        ("round_robin", "round-robin"),
        (" best-fit ", "best-fit"),
        ("most-available-GPU-memory", "magm"),
        ("least-utilized-gpu", "lug"),
    ],
)
def test_the_papers_names_are_understood(text: str, name: str) -> None:
    assert policy_name(text) == name


def test_an_unknown_policy_is_never_taken_for_exclusive() -> None:
    with pytest.raises(BadSettings, match="no policy 'magn'") as caught:
        policy_name("magn")
    assert "Did you mean 'magm'?" in caught.value.hint
    with pytest.raises(BadSettings):
        policy_name("")


def test_a_published_name_with_its_memory_source_leads_to_the_two_settings() -> None:
    with pytest.raises(BadSettings, match="oracle-RR") as caught:
        policy_name("oracle-RR")
    assert 'policy = "round-robin"' in caught.value.hint
    assert 'sources = ["declared"]' in caught.value.hint


def test_a_policy_from_another_package_is_used_by_its_name(install: Install) -> None:
    code = (
        "from carma.core.scheduling.placement import Policy\nPOLICY = Policy('Newest', lambda ask, views, last: [])\n"
    )
    install("carma_newest", "[carma.policies]\nNewest = carma_newest:POLICY\n", code)
    assert policy_name("newest") == "Newest"
    assert isinstance(load_policy("newest"), Policy)


def test_listing_names_imports_nothing(install: Install) -> None:
    install("carma_broken", "[carma.policies]\nbroken = carma_broken:POLICY\n", "raise RuntimeError('no CUDA here')")
    assert "broken" in names(POLICIES)
    assert "broken" in load(POLICIES)
    assert "carma_broken" not in sys.modules


@pytest.mark.parametrize(
    ("code", "finding"),
    [
        ("raise RuntimeError('no CUDA here')", "RuntimeError: no CUDA here"),
        ("import a_module_that_nobody_has", "ModuleNotFoundError"),
        ("POLICE = 1", "AttributeError"),
        ("def (", "SyntaxError"),
    ],
)
def test_a_plugin_that_cannot_be_imported_names_its_package(install: Install, code: str, finding: str) -> None:
    install("carma_broken", "[carma.policies]\nbroken = carma_broken:POLICY\n", code)
    with pytest.raises(PluginError) as caught:
        load_one(POLICIES, "broken")
    assert "'broken' of package carma_broken" in str(caught.value)
    assert finding in str(caught.value)
    assert load_policy("magm").name == "magm"  # the others go on


def test_something_else_than_a_policy_is_refused(install: Install) -> None:
    install("carma_odd", "[carma.policies]\nodd = carma_odd:POLICY\n", "POLICY = 'best'")
    with pytest.raises(PluginError, match="'odd' is a str"):
        load_policy("odd")


def test_two_packages_with_one_name_are_refused(install: Install) -> None:
    install("carma_other", "[carma.policies]\nmagm = carma_other:POLICY\n", "POLICY = 1")
    with pytest.raises(PluginError, match="two packages offer 'magm'") as caught:
        load_policy("magm")
    assert "carma_other" in str(caught.value)


def test_a_package_found_twice_is_one(install: Install) -> None:
    install("carma_again", "[carma.policies]\nmagm = carma.core.policies.magm:POLICY\n", "")
    assert load_policy("magm").name == "magm"


def test_an_unknown_estimator_leads_to_the_nearest_one() -> None:
    with pytest.raises(BadSettings) as caught:
        load_one(ESTIMATORS, "hystory")
    assert "'history'" in caught.value.hint
    assert "nothing" not in load(ESTIMATORS)
