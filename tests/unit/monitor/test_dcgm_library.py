"""The ctypes interface, against a compiled fake libdcgm: layouts, signatures, and error numbers."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from carma.core.model.values import Activity, GpuId
from carma.monitor.dcgm import HostEngine
from carma.monitor.devices import Place
from carma.monitor.libdcgm import GPU, DcgmError, Entity, Libdcgm, open_library

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
SOURCE = Path(__file__).with_name("fake_libdcgm.c")
CONNECTION_NOT_VALID = -21
MODULE_NOT_LOADED = -33

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler to make a libdcgm with")


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A library of its own for each test: it keeps its state in globals."""
    made = tmp_path / "libdcgm.so.4"
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-o", str(made), str(SOURCE)], check=True)
    return str(made)


@pytest.fixture
def script(path: str) -> ctypes.CDLL:
    return ctypes.CDLL(path)


@pytest.fixture
def library(path: str) -> Iterator[Libdcgm]:
    opened = Libdcgm(ctypes.CDLL(path))
    yield opened
    opened.close()


def test_the_newest_library_that_can_be_loaded_is_taken(path: str, script: ctypes.CDLL) -> None:
    opened = open_library((path + ".absent", path))
    assert opened is not None
    assert script.fake_initialised() == 1
    opened.close()
    assert script.fake_initialised() == 0


def test_no_library_is_none() -> None:
    assert open_library(("libdcgm-that-does-not-exist.so.1",)) is None


def test_a_library_that_lacks_the_calls_is_none(tmp_path: Path) -> None:
    source, made = tmp_path / "empty.c", tmp_path / "libempty.so"
    source.write_text("int nothing(void) { return 0; }\n")
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-o", str(made), str(source)], check=True)
    assert open_library((str(made),)) is None


def test_cards_and_instances_are_read_through_the_real_layouts(path: str) -> None:
    engine = HostEngine(lambda: open_library((path,)))
    card, first, second = Place(GpuId("GPU-a")), Place(GpuId("GPU-b"), 3), Place(GpuId("GPU-b"), 5)
    found = engine.read([card, first, second])
    assert engine.problem is None
    assert found[card] == figures(0.0)
    assert found[first] == figures(0.040)
    assert found[second] == figures(0.042)
    engine.close()


def figures(plus: float) -> Activity:
    """The answer of the fake library: the field's last digit in tenths, and a thousandth of the entity's number."""
    return Activity(
        gr_active=1 / 10.0 + plus,
        sm_active=2 / 10.0 + plus,
        sm_occupancy=3 / 10.0 + plus,
        tensor_active=4 / 10.0 + plus,
        dram_active=5 / 10.0 + plus,
    )


def test_values_that_are_not_watched_have_an_error_of_their_own(library: Libdcgm) -> None:
    handle = library.connect("127.0.0.1", 1000)
    (value,) = library.latest(handle, [Entity(GPU, 0)], [1002])
    assert (value.entity, value.field, value.status) == (Entity(GPU, 0), 1002, -14)


def test_a_handle_keeps_all_of_its_bits(library: Libdcgm) -> None:
    handle = library.connect("127.0.0.1", 1000)
    assert handle == 0x7FFFFFFF12345678
    assert library.gpus(handle) == [Entity(GPU, 0), Entity(GPU, 5)]
    with pytest.raises(DcgmError) as caught:
        library.gpus(handle & 0xFFFFFFFF)
    assert caught.value.code == CONNECTION_NOT_VALID


def test_no_host_engine_is_an_error_with_its_number(library: Libdcgm, script: ctypes.CDLL) -> None:
    script.fake_connect_code(CONNECTION_NOT_VALID)
    with pytest.raises(DcgmError, match="dcgmConnect_v2 failed with -21"):
        library.connect("127.0.0.1", 1000)


def test_a_refused_watch_leaves_no_group_behind(path: str, script: ctypes.CDLL) -> None:
    engine = HostEngine(lambda: open_library((path,)))
    script.fake_watch_code(MODULE_NOT_LOADED)
    assert engine.read([Place(GpuId("GPU-a"))]) == {}
    assert "-33" in (engine.problem or "")
    assert script.fake_groups() == 0
    engine.close()
