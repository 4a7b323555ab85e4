"""Listing layers as `carma dataset pack` does: where it fails, and how it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_collect_program import LIMIT_S, is_alive, wait_for

from carma.errors import Refused, Usage
from gpumemnet.dataset.layer_lists import Lister
from gpumemnet_fixtures.dataset_rows import RESIDUAL, config, write_configs

MANY = 400  # fewer than its progress messages: a message without a reader would end it
DEEP = [*RESIDUAL[:1], *RESIDUAL[1:2] * 200, *RESIDUAL[2:]]
LISTING = """
import sys
from pathlib import Path
from gpumemnet.dataset.config import read_configs
from gpumemnet.dataset.layer_lists import Lister
Lister(sys.executable, Path(sys.argv[2]), 2).list(read_configs(Path(sys.argv[1])))
"""


def below(pid: int) -> list[int]:
    """Its children and theirs."""
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found + [each for child in found for each in below(child)]


def test_killed_it_leaves_no_process_behind(tmp_path: Path) -> None:
    configs, layers = tmp_path / "configs.jsonl", tmp_path / "layers.jsonl"
    write_configs(configs, *(config(f"mlp-{number}", model=DEEP) for number in range(MANY)))
    process = subprocess.Popen([sys.executable, "-c", LISTING, str(configs), str(layers)])
    try:
        wait_for(lambda: layers.exists() and layers.stat().st_size)
        behind = below(process.pid)
        assert len(behind) == 3  # the lister and two of its own
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(LIMIT_S)
    wait_for(lambda: not any(map(is_alive, behind)))
    assert len(layers.read_bytes().splitlines()) < MANY  # it was not just done


def test_a_full_disk_is_an_error_with_the_file_and_a_hint(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nulimit -f 0\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with pytest.raises(Refused, match=r"l\.jsonl .*too large") as refused:
        Lister(str(python), tmp_path / "l.jsonl", 1).list([config("a")])
    assert refused.value.hint.startswith("--layers names the file")


def test_a_directory_for_layers_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Usage, match="file cannot be made: File exists") as refused:
        Lister(sys.executable, tmp_path / "file" / "l.jsonl").list([config("a")])
    assert refused.value.hint.startswith("--layers names the file")
