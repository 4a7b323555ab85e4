"""The part inside the user's interpreter, as far as it needs no emulated GPU: reasons for errors, import hooks."""

from __future__ import annotations

import importlib
import sys
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import carma.trial
from tests.golden_text import assert_wording

INSIDE = Path(carma.trial.__file__).parent / "inside"


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a fresh module of the package by its name, or the package."""
    monkeypatch.syspath_prepend(str(INSIDE))
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "carma_trial"}
    yield lambda name="": importlib.import_module(f"carma_trial.{name}".rstrip("."))
    for name in list(sys.modules):
        if name.partition(".")[0] == "carma_trial":
            del sys.modules[name]
    sys.modules.update(kept)


def raised(error: BaseException) -> tuple[type[BaseException], BaseException, Any]:
    try:
        raise error
    except BaseException as caught:
        return type(caught), caught, caught.__traceback__


class ProcessRaisedException(Exception):
    """The exception as torch.multiprocessing names it."""


ERRORS: dict[str, tuple[BaseException, str, str]] = {
    "script": (FileNotFoundError(2, "No such file", "x"), "error", "crashed"),
    "network": (urllib.error.URLError("Name or service not known"), "error", "no_network"),
    "hub": (OSError("We couldn't connect to 'https://huggingface.co'"), "error", "no_network"),
    "CUDA extension": (ImportError("libcudart.so.13: cannot open shared object file"), "unsupported", ""),
    "triton": (ModuleNotFoundError("No module named 'triton'"), "unsupported", ""),
    "operator": (NotImplementedError("own::mix: attempted to run this operator with Meta tensors"), "unsupported", ""),
    "spawned": (ProcessRaisedException("-- Process 0:\nTraceback:\n\nValueError: no such data"), "error", "crashed"),
}


def test_an_error_of_the_script_has_its_kind_its_cause_and_its_sentence(inside: Any) -> None:
    reason_of = inside("ending").reason_of
    found = {name: reason_of(*raised(error)) for name, (error, _, _) in ERRORS.items()}
    expected = {name: (stop, cause) for name, (_, stop, cause) in ERRORS.items()}
    assert {name: (stop, cause) for name, (stop, _, cause) in found.items()} == expected
    without_lines = {
        name: reason.rpartition(" (test_inside.py:")[0] or reason for name, (_, reason, _) in found.items()
    }
    assert_wording("trial_errors", without_lines)


def test_the_reason_contains_the_line_of_the_script(inside: Any) -> None:
    _, reason, _ = inside("ending").reason_of(*raised(ValueError("x")))
    line = raised.__code__.co_firstlineno + 2
    assert reason.endswith(f"(test_inside.py:{line})")


def test_more_gpus_than_requested_come_before_the_error_that_they_cause(inside: Any) -> None:
    processes, ending = inside("gpu_processes"), inside("ending")
    processes.want_cards(2)
    stop, reason, cause = ending.reason_of(*raised(RuntimeError("invalid device ordinal")))
    assert (stop, cause) == ("unsupported", "several")
    assert "-G 2" in reason


def test_a_module_is_changed_when_it_is_imported_also_after_a_search_for_it(
    inside: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hooked_module.py").write_text("value = seen = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    hooks, calls = inside(), list[str]()

    def after(module: ModuleType) -> None:
        calls.append(f"after {module.value}")

    hooks.when_imported("hooked_module", after, before=lambda module: calls.append(f"before {module.__name__}"))
    assert importlib.util.find_spec("hooked_module") is not None
    assert calls == []
    importlib.import_module("hooked_module")
    hooks.when_imported("hooked_module", after)  # imported already
    assert calls == ["before hooked_module", "after 1", "after 1"]
    del sys.modules["hooked_module"]
