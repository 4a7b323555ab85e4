"""One directory of compiled extensions for all test processes."""

from __future__ import annotations

import importlib.util
import shutil

import pytest

from tests.boxes import variant_or_skip
from tests.estimating.trying import Trying


@pytest.fixture(scope="session")
def trying(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Trying:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    if not any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++")):
        pytest.skip("there is no C++ compiler")
    variant_or_skip("self")
    base = tmp_path_factory.getbasetemp()
    shared = (base if worker_id == "master" else base.parent) / "compiled"
    return Trying(tmp_path_factory.mktemp("scripts"), shared)
