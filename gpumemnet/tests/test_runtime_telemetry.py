"""The runtime of the models stores and sends no data about the user's machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.harness import new_home

SUMMARY = "Sequential(\n  (0): Linear(in_features=64, out_features=256, bias=True)\n  (1): ReLU()\n" + (
    "  (2): Linear(in_features=256, out_features=10, bias=True)\n)\n"
)


def test_an_estimate_leaves_no_file_of_the_runtime_in_the_users_home(tmp_path: Path) -> None:
    summary = tmp_path / "model.txt"
    summary.write_text(SUMMARY)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ORT_", "XDG_", "CARMA_"))}
    words = ("--estimator", "gpumemnet", "--gpu", "h200", "--batch", "64", "--input", "64", "--summary", str(summary))
    with new_home() as home:
        done = subprocess.run(
            [sys.executable, "-m", "carma", "estimate", *words],
            env={**environment, "HOME": str(home)},
            capture_output=True,
            text=True,
            check=False,
        )
        left = [path for path in home.rglob("*") if "onnxruntime" in str(path)]
    assert done.returncode == 0, done.stderr
    assert "onnxruntime" not in done.stderr
    assert left == []
