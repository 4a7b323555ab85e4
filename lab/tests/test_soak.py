"""`carma bench soak` with few tasks: its figures are there, and they are of this run."""

from __future__ import annotations

import json
from pathlib import Path

from carma_lab.bench import soak
from carma_lab.bench.soak import tree_size


def test_a_small_soak_has_all_its_figures(tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    assert soak.run(soak.Options(tasks=40, retention_s=0.0, json=str(file))) == 0
    report = json.loads(file.read_bytes())
    found = {figure["name"]: figure["value"] for figure in report["figures"]}
    assert found["tasks.unfinished"] == 0
    assert found["log_inodes.before"] == 0
    assert found["log_inodes.end"] >= 2 * 40, "each attempt has a directory and its output"
    assert found["retention.removed"] + found["retention.left"] == 40
    for name in ("submit.first", "submit.last", "queue.last", "history_1000.last", "server_beside_history.last"):
        assert 0 < found[f"{name}.p50"] <= found[f"{name}.p99"]
    for name in ("rss", "descriptors", "threads"):
        assert all(found[f"{name}.{when}"] > 0 for when in ("before", "end", "retention"))


def test_the_size_of_a_tree_counts_files_directories_and_their_blocks(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "file").write_bytes(b"x" * 5000)
    inodes, used_bytes = tree_size(tmp_path)
    assert inodes == 3
    assert used_bytes >= 5000
