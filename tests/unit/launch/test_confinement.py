"""The mechanism and the guards of an attempt, decided from its order, the settings and the state of MPS."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from carma import launch
from carma.cgroups import Cgroups
from carma.core.model.settings import Sharing
from carma.core.model.values import Booking, Gpu, GpuId, Guard, Owner, Placement
from carma.core.ports import LaunchOrder
from carma.errors import Refused
from carma.launch import confinement
from carma.launch.attempt_cgroups import AttemptCgroups, CgroupLimits, NvmlLimiter
from carma.launch.confinement import GpuConfiner
from carma.launch.memory_caps import Capped, without_hoarding
from carma.launch.mps import MpsServers, UserMps
from carma.launch.mps_control import Control, MpsFailed, ProcessIdentity
from carma.testing.launcher_contract import key, order_of
from tests.golden_text import assert_wording
from tests.launch_orders import spec_of

MODEST = without_hoarding({})  # what keeps a framework from taking the whole card at once
FRAMEWORK = Guard(rung="framework", limit_mib=4096, how="a framework")


class Servers(MpsServers):
    """Gives the same server to every user, or fails."""

    def __init__(self, problem: str = "") -> None:
        self.problem = problem
        self.asked: list[int] = []

    def serve(self, owner: Owner) -> UserMps:
        self.asked.append(owner.uid)
        if self.problem:
            raise MpsFailed(self.problem)
        return UserMps("7.1", Control("/run/mps/7.1", owner, "true"), ProcessIdentity(1, 1), ())


@pytest.fixture(autouse=True)
def one_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of frameworks have tests of their own."""
    monkeypatch.setattr(
        confinement,
        "framework_caps",
        lambda _order, cap_mib, context_mib, **_more: Capped(
            environment={"CAP": f"{cap_mib}-{context_mib}"}, guards=(FRAMEWORK,), note="of the framework"
        ),
    )


def order(
    kind: Literal["card", "mig"] = "card",
    *,
    gpus: int = 1,
    cap_mib: int | None = None,
    alone: bool = False,
    **spec: Any,
) -> LaunchOrder:
    cards = tuple(Gpu(id=GpuId(f"GPU-{i}"), index=i, name="H200", memory_mib=143_155, kind=kind) for i in range(gpus))
    booking = Booking(memory_mib=4000, source="declared", cap_mib=cap_mib, alone=alone)
    made = order_of(spec_of("true", **spec))
    placement = Placement(gpus=tuple(card.id for card in cards), booking=booking)
    return msgspec.structs.replace(made, placement=placement, gpus=cards)


def rungs(confiner: GpuConfiner, given: LaunchOrder) -> list[str]:
    return [guard.rung for guard in confiner.arrange(given).confinement.guards]


def test_auto_uses_mps_if_it_is_available() -> None:
    arranged = GpuConfiner(Sharing(), Servers()).arrange(order())
    assert arranged.confinement.mechanism == "mps"
    assert arranged.confinement.note == ""
    assert arranged.mps_server == "7.1"
    assert arranged.environment == {
        "CUDA_MPS_PIPE_DIRECTORY": "/run/mps/7.1",
        "CUDA_MPS_LOG_DIRECTORY": "/run/mps/7.1/log",
        **MODEST,
    }


def test_the_limits_of_mps_are_by_the_places_that_the_task_sees() -> None:
    arranged = GpuConfiner(Sharing(), Servers()).arrange(order(gpus=2, cap_mib=4096, threads_percent=30))
    assert arranged.environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=4096M,1=4096M"
    assert arranged.environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "30"


def test_the_rungs_are_listed_from_the_hardest_down() -> None:
    arranged = GpuConfiner(Sharing(context_mib=700), Servers()).arrange(order(cap_mib=4096))
    assert [(g.rung, g.limit_mib) for g in arranged.confinement.guards] == [
        ("mps", 4096),
        ("framework", 4096),
        ("watchdog", 4000),
    ]
    assert arranged.environment["CAP"] == "4096-700"
    assert arranged.confinement.note == "of the framework"


def test_without_a_cap_only_the_watchdog_is_left() -> None:
    assert rungs(GpuConfiner(Sharing(), Servers()), order()) == ["watchdog"]
    assert rungs(GpuConfiner(Sharing(watchdog=False), Servers()), order()) == []
    assert rungs(GpuConfiner(Sharing(watchdog=False), Servers()), order(cap_mib=4096)) == ["mps", "framework"]


def test_auto_falls_back_and_says_why() -> None:
    arranged = GpuConfiner(Sharing(), Servers("it is broken")).arrange(order(cap_mib=4096))
    assert arranged.confinement.mechanism == "timeslice"
    assert "it is broken" in arranged.confinement.note
    assert "of the framework" in arranged.confinement.note
    assert [guard.rung for guard in arranged.confinement.guards] == ["framework", "watchdog"]
    assert arranged.mps_server is None
    assert arranged.environment == {**MODEST, "CAP": "4096-800"}
    assert GpuConfiner(Sharing(), None).arrange(order()).confinement.note


@pytest.mark.parametrize("servers", [Servers("it is broken"), None])
def test_demanded_mps_that_is_not_available_is_refused(servers: Servers | None) -> None:
    with pytest.raises(Refused):
        GpuConfiner(Sharing(), servers).arrange(order(mechanism="mps"))
    with pytest.raises(Refused):
        GpuConfiner(Sharing(mechanism="mps"), servers).arrange(order())


@pytest.mark.parametrize(
    ("settings", "wish", "mechanism"),
    [
        ("auto", None, "mps"),
        ("auto", "timeslice", "timeslice"),
        ("timeslice", None, "timeslice"),
        ("timeslice", "mps", "mps"),
        ("mps", None, "mps"),
        ("mps", "timeslice", "timeslice"),
    ],
)
def test_the_mechanism_of_the_task_overrides_the_setting(settings: Any, wish: str | None, mechanism: str) -> None:
    servers = Servers()
    arranged = GpuConfiner(Sharing(mechanism=settings), servers).arrange(order(mechanism=wish))
    assert arranged.confinement.mechanism == mechanism
    assert bool(servers.asked) == (mechanism == "mps")


def test_a_share_of_the_sms_without_mps_is_noted() -> None:
    confiner = GpuConfiner(Sharing(mechanism="timeslice"), None)
    arranged = confiner.arrange(order(threads_percent=30))
    assert arranged.confinement.note
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in arranged.environment


def test_an_attempt_alone_on_its_gpus_is_a_plain_process_without_guards() -> None:
    servers = Servers()
    arranged = GpuConfiner(Sharing(), servers).arrange(order(alone=True, cap_mib=4096))
    assert arranged.confinement.mechanism == "timeslice"
    assert arranged.confinement.guards == ()
    assert arranged.confinement.note
    assert arranged.environment == {}
    assert servers.asked == []
    assert GpuConfiner(Sharing(), servers).arrange(order(alone=True, mechanism="mps")).mps_server == "7.1"


@pytest.mark.parametrize(("wish", "note"), [(None, ""), ("mps", "MPS is not used on MIG instances")])
def test_mig_instances_never_use_mps(wish: str | None, note: str) -> None:
    servers = Servers()
    found = GpuConfiner(Sharing(), servers).arrange(order("mig", mechanism=wish)).confinement
    assert (found.mechanism, found.note) == ("mig", note)
    assert rungs(GpuConfiner(Sharing(), servers), order("mig", cap_mib=4096)) == ["framework", "watchdog"]
    assert servers.asked == []


def test_a_server_of_mig_instances_refuses_whole_cards() -> None:
    confiner = GpuConfiner(Sharing(mechanism="mig"), Servers())
    assert confiner.arrange(order("mig")).confinement.mechanism == "mig"
    with pytest.raises(Refused):
        confiner.arrange(order())


class Driver(NvmlLimiter):
    """Keeps all limits that are set, or none."""

    def __init__(self, works: bool) -> None:
        self.works = works
        self.limits: dict[tuple[str, str], int] = {}

    def missing(self) -> str | None:
        return None

    def set_limit(self, gpu: GpuId, cgroup: str, limit_bytes: int) -> None:
        self.limits[gpu, cgroup] = limit_bytes if self.works else 0

    def limit(self, gpu: GpuId, cgroup: str) -> int:
        return self.limits[gpu, cgroup]


def groups_in(folder: Path) -> AttemptCgroups:
    return AttemptCgroups(Cgroups(2, {"": str(folder)}, frozenset()), "/var/log/carma")


def test_a_limit_of_the_cgroup_stands_in_place_of_the_frameworks(tmp_path: Path) -> None:
    confiner = GpuConfiner(Sharing(), Servers(), CgroupLimits(Driver(works=True), groups_in(tmp_path)))
    arranged = confiner.arrange(order(cap_mib=4096))
    assert [guard.rung for guard in arranged.confinement.guards] == ["mps", "cgroup", "watchdog"]
    assert groups_in(tmp_path).existing() == [key()]
    assert "CAP" not in arranged.environment
    assert arranged.environment.items() >= MODEST.items()


def test_a_limit_that_the_driver_does_not_keep_is_no_guard(tmp_path: Path) -> None:
    confiner = GpuConfiner(Sharing(), Servers(), CgroupLimits(Driver(works=False), groups_in(tmp_path)))
    arranged = confiner.arrange(order(cap_mib=4096))
    assert [guard.rung for guard in arranged.confinement.guards] == ["mps", "framework", "watchdog"]
    assert groups_in(tmp_path).existing() == []


def test_a_task_without_gpus_needs_nothing() -> None:
    servers = Servers()
    arranged = GpuConfiner(Sharing(mechanism="mps"), servers).arrange(order(gpus=0))
    assert arranged.confinement.guards == ()
    assert arranged.environment == {}
    assert servers.asked == []


def refusal(confiner: GpuConfiner, given: LaunchOrder) -> str:
    with pytest.raises(Refused) as caught:
        confiner.arrange(given)
    return f"{caught.value}. {caught.value.hint}"


def test_the_wording_of_notes_and_refusals() -> None:
    working, broken = Servers(), Servers("it is broken")

    def note(sharing: Sharing, servers: Servers | None, given: LaunchOrder) -> str:
        return GpuConfiner(sharing, servers).arrange(given).confinement.note

    texts = {
        "MPS is broken": note(Sharing(), broken, order()),
        "no MPS servers": note(Sharing(), None, order()),
        "alone": note(Sharing(), working, order(alone=True)),
        "MIG and MPS": note(Sharing(), working, order("mig", mechanism="mps")),
        "a share of the SMs": note(Sharing(mechanism="timeslice"), working, order(threads_percent=30)),
        "MPS for this task": refusal(GpuConfiner(Sharing(), broken), order(mechanism="mps")),
        "MPS only": refusal(GpuConfiner(Sharing(mechanism="mps"), broken), order()),
        "MIG only": refusal(GpuConfiner(Sharing(mechanism="mig"), working), order()),
    }
    guards = GpuConfiner(Sharing(), working).arrange(order(cap_mib=4096)).confinement.guards
    assert_wording("confinement", texts | {f"guard {guard.rung}": guard.how for guard in guards})


def test_launch_knows_nothing_of_virtual_gpus() -> None:
    """They differ behind the seams only. Python's virtual environments are something else."""
    for file in Path(launch.__file__).parent.glob("*.py"):
        assert not re.findall(r"(?i)virtual(?!\s+environment|_env)|vgpu", file.read_text(encoding="utf-8")), file.name
