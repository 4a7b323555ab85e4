"""Memory limits of cgroups, on ordinary files in place of the kernel's, with a scripted NVML."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from msgspec.structs import replace

from carma import cgroups
from carma.core.model.values import Gpu, GpuId
from carma.core.ports import LaunchOrder
from carma.launch.attempt_cgroups import AttemptCgroups, CgroupLimits, LimitFailed, NvmlLimiter
from carma.testing.launcher_contract import key, order_of
from tests.launch_orders import spec_of

CARD = Gpu(id=GpuId("GPU-0a"), index=0, name="H200", memory_mib=143_000)
SECOND = Gpu(id=GpuId("GPU-0b"), index=1, name="H200", memory_mib=143_000)
MIG = Gpu(id=GpuId("MIG-1"), index=2, name="MIG 1g", memory_mib=16_000, kind="mig")
OWN = "/system.slice/carma.service/daemon"


C_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p)


class Driver:
    """The two C functions behind NVML: their arguments are a handle and the address of a struct."""

    def __init__(self) -> None:
        self.version = "615.71.09"
        self.limits: dict[tuple[int, str], tuple[int, int]] = {}
        self.refuses = 0
        self.forgets = False
        self._functions = {
            "nvmlDeviceSetMemoryLimits_v1": C_FUNCTION(self._set),
            "nvmlDeviceGetMemoryLimits_v1": C_FUNCTION(self._get),
        }

    def function(self, name: str) -> Any:
        return self._functions[name]

    def _set(self, handle: int, address: int) -> int:
        path, soft, hard = struct.unpack("=QQQ", ctypes.string_at(address, 24))
        if not self.refuses and not self.forgets:
            self.limits[handle, ctypes.string_at(path).decode()] = (soft, hard)
        return self.refuses

    def _get(self, handle: int, address: int) -> int:
        (path,) = struct.unpack("=Q", ctypes.string_at(address, 8))
        soft, hard = self.limits.get((handle, ctypes.string_at(path).decode()), (0, 2**64 - 1))
        ctypes.memmove(address, struct.pack("=QQQQ", path, soft, hard, 4096), 32)
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    handles = {CARD.id: 1, SECOND.id: 2}
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", driver.function)
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: driver.version)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", handles.__getitem__)
    return driver


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A service with a delegated cgroup, and the daemon in a leaf of it."""
    base = tmp_path / "system.slice" / "carma.service"
    (base / "daemon").mkdir(parents=True)
    (tmp_path / "cgroup.controllers").write_text("cpu memory dmem\n")
    (base / "cgroup.controllers").write_text("cpu memory dmem\n")
    (base / "cgroup.subtree_control").write_text("")
    (base / "cgroup.procs").write_text("")
    (tmp_path / "own").write_text(f"0::{OWN}\n")
    marked = {str(base): b"1"}

    def getxattr(path: str, name: str) -> bytes:
        if name == "trusted.delegate" and path in marked:
            return marked[path]
        raise OSError(61, "No data available")

    monkeypatch.setattr(os, "getxattr", getxattr)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return tmp_path


def base_of(tree: Path) -> Path:
    return tree / "system.slice" / "carma.service"


def groups_of(tree: Path, own: str = OWN) -> AttemptCgroups | str:
    (tree / "own").write_text(f"0::{own}\n")
    found = cgroups.find(root=str(tree), own=str(tree / "own"), systemd=str(tree))
    return found if isinstance(found, str) else AttemptCgroups(found, "/var/log/carma")


def found(tree: Path, *gpus: Gpu, own: str = OWN) -> CgroupLimits | str:
    groups = groups_of(tree, own)
    assert isinstance(groups, AttemptCgroups), groups
    return find(groups, *gpus)


def find(groups: AttemptCgroups, *gpus: Gpu) -> CgroupLimits | str:
    """The limits, or why there are none."""
    try:
        return CgroupLimits.find(NvmlLimiter(pynvml), gpus or (CARD,), groups)
    except LimitFailed as reason:
        return str(reason)


def limits(tree: Path) -> CgroupLimits:
    answer = found(tree)
    assert isinstance(answer, CgroupLimits), answer
    return answer


def ordered(*gpus: Gpu) -> LaunchOrder:
    order = order_of(spec_of("true"), gpus=tuple(gpu.id for gpu in gpus))
    return replace(order, gpus=gpus)


def test_an_attempt_gets_a_cgroup_of_its_own_with_a_hard_limit_on_each_gpu(driver: Driver, tree: Path) -> None:
    here = limits(tree)
    guard = here.guard(ordered(CARD, SECOND), 4096)
    assert guard is not None
    assert (guard.rung, guard.limit_mib) == ("cgroup", 4096)
    groups = groups_of(tree)
    assert isinstance(groups, AttemptCgroups)
    (path,) = groups.create(key()).directories
    assert os.path.dirname(path) == str(base_of(tree))
    assert driver.limits == {(1, path): (0, 4096 * 2**20), (2, path): (0, 4096 * 2**20)}
    assert groups.existing() == [key()]
    groups.remove(key())
    assert not os.path.exists(path)
    groups.remove(key())


def test_the_same_order_twice_is_limited_once(driver: Driver, tree: Path) -> None:
    here = limits(tree)
    assert here.guard(ordered(CARD), 4096) == here.guard(ordered(CARD), 4096)
    assert len(driver.limits) == 1


@pytest.mark.usefixtures("driver")
def test_the_controller_is_handed_down_where_the_kernel_has_it(tree: Path) -> None:
    limits(tree)
    assert "+dmem" in (base_of(tree) / "cgroup.subtree_control").read_text()


@pytest.mark.usefixtures("driver")
def test_without_the_controller_nothing_is_written(tree: Path) -> None:
    (base_of(tree) / "cgroup.controllers").write_text("cpu\n")
    limits(tree)
    assert (base_of(tree) / "cgroup.subtree_control").read_text() == ""


@pytest.mark.parametrize("fault", ["refuses", "forgets"])
def test_a_limit_that_does_not_hold_is_not_claimed(driver: Driver, tree: Path, fault: str) -> None:
    here = limits(tree)
    setattr(driver, fault, pynvml.NVML_ERROR_NO_PERMISSION)
    assert here.guard(ordered(CARD), 4096) is None
    groups = groups_of(tree)
    assert isinstance(groups, AttemptCgroups)
    assert groups.existing() == []


@pytest.mark.usefixtures("driver")
def test_mig_instances_have_none(tree: Path) -> None:
    assert limits(tree).guard(ordered(MIG), 4096) is None
    answer = found(tree, MIG)
    assert isinstance(answer, str)
    assert "MIG" in answer


def test_an_older_driver_says_from_which_one_on(driver: Driver, tree: Path) -> None:
    driver.version = "580.159.03"
    answer = found(tree)
    assert isinstance(answer, str)
    assert "580.159.03" in answer
    assert "615" in answer


def test_an_older_library_and_an_older_driver_have_different_reasons() -> None:
    old = SimpleNamespace(NVMLError=pynvml.NVMLError, nvmlSystemGetDriverVersion=lambda: "620.10")
    missing = NvmlLimiter(old).missing()
    assert missing is not None
    assert "nvidia-ml-py" in missing


def test_a_driver_that_does_not_answer_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> str:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)

    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", gone)
    missing = NvmlLimiter(pynvml).missing()
    assert missing is not None
    assert "does not answer" in missing


@pytest.mark.usefixtures("driver")
def test_cgroup_version_1_a_plain_user_and_a_cgroup_of_others_are_reasons(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = groups_of(tree, own="/user.slice/session-1.scope")
    assert isinstance(elsewhere, str)
    assert "Delegate=yes" in elsewhere
    version_1 = AttemptCgroups(cgroups.Cgroups(1, {"pids": str(tree)}, frozenset({"pids"})), "/var/log/carma")
    refused = find(version_1)
    assert isinstance(refused, str)
    assert "version 2" in refused
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    user = found(tree)
    assert isinstance(user, str)
    assert "root" in user


@pytest.mark.usefixtures("driver")
def test_a_cgroup_that_cannot_hand_the_controller_down_is_a_reason(tree: Path) -> None:
    control = base_of(tree) / "cgroup.subtree_control"
    control.unlink()
    control.mkdir()  # cannot be written to, as where the daemon itself lives in it
    answer = found(tree)
    assert isinstance(answer, str)
    assert "dmem" in answer


def test_the_limit_travels_as_the_headers_have_it(driver: Driver) -> None:
    """On 64-bit machines: the address of the path, the soft limit, the hard limit."""
    limiter = NvmlLimiter(pynvml)
    limiter.set_limit(CARD.id, "/sys/fs/cgroup/x", 5 * 2**30)
    assert limiter.limit(CARD.id, "/sys/fs/cgroup/x") == 5 * 2**30
    driver.refuses = pynvml.NVML_ERROR_NOT_SUPPORTED
    with pytest.raises(LimitFailed):
        limiter.set_limit(CARD.id, "/sys/fs/cgroup/x", 1)
