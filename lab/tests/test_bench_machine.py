"""The facts about the machine and its processes that the benches report."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from carma.errors import Refused
from carma_lab.bench.machine import cpu_s
from carma_lab.bench.results_file import Figure, write

BUSY = "import time\nuntil = time.process_time() + 0.3\nwhile time.process_time() < until: pass"


def test_a_childs_processor_time_is_not_its_parents() -> None:
    """A daemon waits for its runners, and a runner for its task: four tasks would look like 400 % of a core."""
    before_s = cpu_s(os.getpid())
    subprocess.run([sys.executable, "-S", "-c", BUSY], check=True)
    assert cpu_s(os.getpid()) - before_s < 0.2
    until_s = cpu_s(os.getpid()) + 0.1
    while cpu_s(os.getpid()) < until_s:  # ends only if its own time is counted
        pass


def test_figures_are_written_whole_and_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = Figure(name="a", value=1.0, unit="s", how="so")
    old = tmp_path / "old.json"
    old.write_text("before")
    monkeypatch.setattr("gpumemnet.directories.secrets.token_hex", lambda _: "0000aaaa")
    (tmp_path / "old.json.0000aaaa.part").mkdir()  # in the way of what is written beside
    with pytest.raises(Refused, match=r"old\.json cannot be written"):
        write(figure, str(old))
    assert old.read_text() == "before"
    monkeypatch.undo()
    link = tmp_path / "link"
    link.symlink_to(old)
    write(figure, str(link))
    assert link.is_symlink()
    assert msgspec.json.decode(old.read_bytes(), type=Figure) == figure
