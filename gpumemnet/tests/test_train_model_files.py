"""A model's two files: cut short at any step, a reader finds one whole model, the old or the new."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from carma.errors import PluginError, Refused
from gpumemnet import directories as folders
from gpumemnet.serving.model import candidates
from gpumemnet.serving.model_facts import Facts, digest, read_pair
from gpumemnet_fixtures import gpumemnet_models as tiny

# A process with threads warns of forks in newer versions of Python; what is forked here runs no other thread.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
CHANGES = ("open", "os.rename", "os.remove")  # what Python's audit tells of each step on a file
OLD, NEW, NEWEST = (tiny.facts(base_mib=float(number)) for number in (1, 2, 3))
GRAPHS = {facts.base_mib: bytes([number]) * 9_000 for number, facts in enumerate((OLD, NEW, NEWEST))}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write(OLD, tmp_path / "mlp-mlp.json")
    return tmp_path / "mlp-mlp.json"


def write(facts: Facts, file: Path) -> None:
    from gpumemnet.training.shipped_models import write_pair

    write_pair(facts, GRAPHS[facts.base_mib], file)


def in_fork(call: Callable[[], None]) -> int:
    """Its exit status; 0 where nothing was raised."""
    pid = os.fork()
    if pid == 0:
        try:
            call()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_at(step: int, facts: Facts, file: Path) -> bool:
    """False if the write was complete before this number of steps."""

    def call() -> None:
        left = step

        def look(event: str, words: tuple[object, ...]) -> None:
            nonlocal left
            if event in CHANGES and str(file.parent) in str(words[0]):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(look)
        write(facts, file)

    status = in_fork(call)
    assert status in (0, -signal.SIGKILL)
    return status != 0


def held(file: Path) -> float:
    """Which model is there, whole."""
    facts, graph = read_pair(file)
    assert graph == GRAPHS[facts.base_mib]
    return facts.base_mib


def names(file: Path) -> list[str]:
    return sorted(each.name for each in file.parent.iterdir())


def test_killed_at_any_step_the_old_or_the_new_model_is_there(file: Path) -> None:
    found: list[float] = []
    while killed_at(len(found), NEW, file):
        found.append(held(file))
        write(OLD, file)
    assert set(found) == {1.0, 2.0}
    assert held(file) == 2.0
    assert names(file) == ["mlp-mlp.json", "mlp-mlp.onnx"]


def test_one_that_was_cut_short_is_not_lost_when_the_next_is_too(file: Path) -> None:
    step = 0
    while held(file) == 1.0:  # until it is cut short just when it holds
        assert killed_at(step, NEW, file)
        step += 1
    left = {each: each.read_bytes() for each in file.parent.iterdir()}
    assert file.with_suffix(".onnx.new") in left
    again = 0
    while killed_at(again, NEWEST, file):
        assert held(file) in (2.0, 3.0)
        for each, data in left.items():
            each.write_bytes(data)
        again += 1
    assert held(file) == 3.0
    assert names(file) == ["mlp-mlp.json", "mlp-mlp.onnx"]


def test_a_full_disk_leaves_the_old_model_and_names_the_file(file: Path) -> None:
    """A limit on the size of files stands for the disk: the kernel writes a part, then says no."""

    def call() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, 4_000))
        with pytest.raises(Refused, match=r"mlp-mlp\.onnx.*too large"):
            write(NEW, file)

    assert in_fork(call) == 0
    assert held(file) == 1.0
    assert names(file) == ["mlp-mlp.json", "mlp-mlp.onnx"]


def test_where_the_facts_cannot_be_written_the_old_model_stays(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        if path.suffix == ".json":
            raise OSError(28, "No space left on device")
        folders.write_whole(path, data)

    monkeypatch.setattr("gpumemnet.training.shipped_models.write_whole", full)
    with pytest.raises(Refused, match="No space left on device"):
        write(NEW, file)
    assert held(file) == 1.0
    assert names(file) == ["mlp-mlp.json", "mlp-mlp.onnx"]


def test_the_graph_of_another_model_is_refused(file: Path) -> None:
    file.with_suffix(".onnx").write_bytes(GRAPHS[2.0])
    with pytest.raises(PluginError, match=r"mlp-mlp\.json"):
        read_pair(file)
    file.with_suffix(".onnx").unlink()
    with pytest.raises(PluginError, match="is missing"):
        read_pair(file)


def test_estimates_do_not_rest_on_a_graph_of_another_model(tmp_path: Path) -> None:
    file = tiny.save(tmp_path, replace(tiny.facts(), graph_sha256=digest(b"another")))
    found, (why,) = candidates("mlp", "mlp", "", [tmp_path])
    assert (found, "is not the graph" in why) == ([], True)
    tiny.save(tmp_path, replace(tiny.facts(), graph_sha256=digest(file.with_suffix(".onnx").read_bytes())))
    assert candidates("mlp", "mlp", "", [tmp_path])[1] == []
